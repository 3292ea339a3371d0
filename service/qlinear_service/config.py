"""Every knob of the server: frozen values grouped by owner, with their defaults and bounds.

Knows nothing of flags, environment or files: `config_sources.py` reads those and says where each
value came from. An owner is handed its own group and no other.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from qlinear_service.errors import ConfigError
from qlinear_service.kernels.build import default_cache_dir

__all__ = [
    "BatchingConfig",
    "KernelConfig",
    "LimitsConfig",
    "OptionError",
    "ServerConfig",
    "ServiceConfig",
    "size_class",
]

T = TypeVar("T")
MIB = 1 << 20
GIB = 1 << 30
MOST_ROWS = (1 << 31) - 1  # messages carry the rows of a batch in 32 bits
MOST_MEMORY_BYTES = 1 << 46  # 64 TiB: more than any machine has, and far from overflow anywhere
MOST_THREADS = 1024  # more than the cores of any machine; tens of thousands crash OpenMP
SMALLEST_SLOT_BYTES = 1024


class OptionError(ConfigError):
    """One option has a value that cannot be used.

    Args:
        option: its name, as in the TOML file.
        problem: one sentence with the value and the rule.
    """

    def __init__(self, option: str, problem: str) -> None:
        self.option = option
        self.problem = problem
        super().__init__(f"{option}: {problem}")


def size_class(nbytes: int) -> int:
    """Return the bytes of the slot that holds `nbytes`: the next power of two from 1 KiB."""
    return max(SMALLEST_SLOT_BYTES, 1 << max(nbytes - 1, 0).bit_length())


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MOST_THREADS)
    return min(os.cpu_count() or 1, MOST_THREADS)


def _option(
    default: T,
    doc: str,
    *,
    name: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
) -> T:
    return field(
        default=default,
        metadata={"doc": doc, "name": name, "minimum": minimum, "maximum": maximum},
    )


def _computed_option(
    factory: Callable[[], T],
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
) -> T:
    metadata = {"doc": doc, "minimum": minimum, "maximum": maximum}
    return field(default_factory=factory, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    def __post_init__(self) -> None:
        for item in fields(self):
            value: Any = getattr(self, item.name)
            minimum, maximum = item.metadata.get("minimum"), item.metadata.get("maximum")
            low = minimum is not None and not value >= minimum
            high = maximum is not None and not value <= maximum
            if low or high:
                rule = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
                name = item.metadata.get("name") or item.name
                raise OptionError(name, f"is {value}; expected {rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(_Group):
    """The listener and the life of the process. Owner: server.py."""

    host: str = _option(
        "127.0.0.1", "Address to listen on; the default is reachable from this machine only."
    )
    port: int = _option(
        50051,
        "Port of the gRPC service; 0 picks a free one and prints it.",
        minimum=0,
        maximum=65535,
    )
    metrics_port: int = _option(
        9464,
        "Port of the page and of /metrics; 0 picks a free one and prints it, -1 opens none.",
        minimum=-1,
        maximum=65535,
    )
    frontends: int = _option(
        0,
        "Front-end processes; 0, all in one process, is the only value so far.",
    )
    drain_delay_seconds: float = _option(
        1.0,
        "After SIGTERM: how long NOT_SERVING is shown before new calls are refused. At least the "
        "time in which balancers notice; 5 to 10 on Kubernetes.",
        minimum=0,
        maximum=3600,
    )
    grace_seconds: float = _option(
        30.0,
        "After the drain delay: how long calls that are in may take to finish.",
        minimum=0,
        maximum=3600,
    )
    reflection: bool = _option(True, "Offer gRPC server reflection, for grpcurl and the like.")
    log_level: str = _option("info", "Least level that is logged: debug, info, warning or error.")

    def __post_init__(self) -> None:
        _Group.__post_init__(self)
        if not self.host or any(sign.isspace() for sign in self.host):
            raise OptionError("host", f"is {self.host!r}; expected a name or an address")
        if self.frontends != 0:
            raise OptionError(
                "frontends",
                f"is {self.frontends}; the split into processes is not built yet, and only 0 is "
                "accepted",
            )
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise OptionError(
                "log_level", f"is {self.log_level!r}; expected debug, info, warning or error"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig(_Group):
    """What one call and the whole queue may hold. Owners: codec, slots, batching."""

    max_request_bytes: int = _option(
        32 * MIB,
        "Most bytes of activations in one call. gRPC's own limit for a message is twice that.",
        minimum=1024,
        maximum=GIB - 1,
    )
    max_response_bytes: int = _option(
        256 * MIB,
        "Most bytes of results of one call, computed from the shapes before anything runs.",
        minimum=1024,
        # protobuf cannot encode a message of 2 GiB or more.
        maximum=2 * GIB - MIB,
    )
    max_request_rows: int = _option(
        65536, "Most rows of activations in one call.", minimum=1, maximum=MOST_ROWS
    )
    max_request_layers: int = _option(
        256, "Most layers asked for in one call.", minimum=1, maximum=65536
    )
    max_queue_rows: int = _option(
        262144,
        "Most rows that may wait; beyond it calls are told to come again.",
        minimum=1,
        maximum=MOST_ROWS,
    )
    max_queue_bytes: int = _option(
        GIB,
        "Memory for calls that wait or run; beyond it calls are told to come again.",
        minimum=1024,
        maximum=MOST_MEMORY_BYTES,
    )
    max_queue_age_seconds: float = _option(
        5.0,
        "Longest wait in seconds; a call that waited longer is dropped and told to come again.",
        name="max_queue_age",
        minimum=0.001,
        maximum=86400,
    )
    max_stream_calls: int = _option(
        1024,
        "Most unanswered calls of one stream; beyond it the server stops reading the stream.",
        minimum=1,
        maximum=1 << 20,
    )
    max_stream_bytes: int = _option(
        256 * MIB,
        "Memory for the answers of one stream until its client has read them; beyond it the "
        "server stops reading the stream. One call always fits.",
        minimum=1024,
        maximum=MOST_MEMORY_BYTES,
    )

    def __post_init__(self) -> None:
        _Group.__post_init__(self)
        if self.max_queue_rows < self.max_request_rows:
            raise OptionError(
                "max_queue_rows",
                f"is {self.max_queue_rows}; expected at least max_request_rows "
                f"({self.max_request_rows}), or the largest call could never enter",
            )
        if self.max_queue_bytes < self.largest_slot_bytes:
            raise OptionError(
                "max_queue_bytes",
                f"is {self.max_queue_bytes}; expected at least {self.largest_slot_bytes}, the slot "
                "of the largest call; raise it, or lower max_request_bytes and max_response_bytes",
            )

    @property
    def largest_slot_bytes(self) -> int:
        """Bytes of the slot of the largest call that is let in."""
        return size_class(max(self.max_request_bytes, self.max_response_bytes))

    @property
    def max_message_bytes(self) -> int:
        """GRPC's own limit, well above ours, so that callers see our text and not its."""
        return 2 * self.max_request_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig(_Group):
    """How calls become batches. Owner: batching."""

    max_batch_rows: int = _option(
        1024,
        "Most rows of one batch. Larger batches use the device better and make others wait longer.",
        minimum=1,
        maximum=MOST_ROWS,
    )
    max_wait_us: int = _option(
        0,
        "Longest artificial wait for more calls, in microseconds; 0, no wait, is the only value "
        "so far.",
    )

    def __post_init__(self) -> None:
        _Group.__post_init__(self)
        if self.max_wait_us != 0:
            raise OptionError(
                "max_wait_us",
                f"is {self.max_wait_us}; waiting for more calls is not built yet, and only 0 is "
                "accepted",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig(_Group):
    """Where and with what layers are computed. Owners: loading, kernels."""

    device: str = _option("cpu", "Device that computes: cpu, or cuda:N.")
    cpu_threads: int = _computed_option(
        _usable_cores,
        "Most threads of one CPU computation; default: all usable cores.",
        minimum=1,
        maximum=MOST_THREADS,
    )
    cache_dir: Path = _computed_option(  # noqa: RUF009 - a field specifier
        default_cache_dir, "Folder of built kernels; may be read-only or absent."
    )
    torch_only: bool = _option(
        False, "Compute with plain torch and build no kernels: right, and slow."
    )

    def __post_init__(self) -> None:
        _Group.__post_init__(self)
        kind, colon, index = self.device.partition(":")
        if self.device != "cpu" and not (kind == "cuda" and colon and index.isdecimal()):
            raise OptionError("device", f"is {self.device!r}; expected cpu or cuda:N, as in cuda:0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """All groups together. Only the composition root holds this."""

    server: ServerConfig = field(default_factory=ServerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
