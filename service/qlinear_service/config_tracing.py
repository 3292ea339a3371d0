"""The knobs of tracing; `config.py` holds all others."""

from dataclasses import dataclass

from qlinear_service.config_fields import Group, OptionError, option

__all__ = ["TracingConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig(Group):
    """Where spans go. Owner: spans.py."""

    trace_endpoint: str = option(
        "",
        "OTLP collector (gRPC) that spans are sent to, as in http://127.0.0.1:4317; empty: no call "
        "is traced. Needs the extra qlinear[tracing].",
        unit="URL",
    )
    trace_ratio: float = option(
        0.0,
        "Share of the calls without a trace context that are traced; others do as their callers "
        "say.",
        minimum=0,
        maximum=1,
    )

    def __post_init__(self) -> None:
        Group.__post_init__(self)
        scheme, separator, rest = self.trace_endpoint.partition("://")
        if self.trace_endpoint and not (scheme in ("http", "https") and separator and rest):
            raise OptionError(
                "trace_endpoint",
                f"is {self.trace_endpoint!r}; expected a URL, as in http://127.0.0.1:4317",
            )
