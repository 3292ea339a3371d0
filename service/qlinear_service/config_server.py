"""How the server listens and lives: the group of options that server.py owns."""

from dataclasses import dataclass

from qlinear_service.config_fields import Group, OptionError, one_of, option

__all__ = ["ServerConfig"]

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Group):
    """The listener and the life of the process. Owner: server.py."""

    host: str = option(
        "127.0.0.1", "Address to listen on; the default is reachable from this machine only."
    )
    port: int = option(
        50051,
        "Port of the gRPC service; 0 picks a free one and prints it.",
        minimum=0,
        maximum=65535,
    )
    metrics_port: int = option(
        9464,
        "Port of the page and of /metrics; 0 picks a free one and prints it, -1 opens none.",
        minimum=-1,
        maximum=65535,
    )
    frontends: int = option(
        0,
        "Front-end processes; 0, all in one process, is the only value so far.",
        unit="PROCESSES",
    )
    drain_delay_seconds: float = option(
        1.0,
        "After SIGTERM: how long NOT_SERVING is shown before new calls are refused. At least the "
        "time in which balancers notice; 5 to 10 on Kubernetes.",
        minimum=0,
        maximum=3600,
    )
    grace_seconds: float = option(
        30.0,
        "After the drain delay: how long calls that are in may take to finish.",
        minimum=0,
        maximum=3600,
    )
    max_connection_seconds: float = option(
        300.0,
        "Age at which a connection is told to end; nothing on it is cut off. Clients look for new "
        "servers only when a connection ends: less finds them sooner, at more connecting.",
        minimum=0.1,
        maximum=86400,
    )
    reflection: bool = option(True, "Offer gRPC server reflection, for grpcurl and the like.")
    log_level: str = option("info", "Least level that is logged.", unit=one_of(LOG_LEVELS))
    log_format: str = option(
        "text", "Form of log lines; text is key=value.", unit=one_of(LOG_FORMATS)
    )

    def __post_init__(self) -> None:
        Group.__post_init__(self)
        if not self.host or any(sign.isspace() for sign in self.host):
            raise OptionError("host", f"is {self.host!r}; expected a name or an address")
        if self.frontends != 0:
            raise OptionError(
                "frontends",
                f"is {self.frontends}; the split into processes is not built yet, and only 0 is "
                "accepted",
            )
        if self.log_level not in LOG_LEVELS:
            raise OptionError(
                "log_level", f"is {self.log_level!r}; expected debug, info, warning or error"
            )
        if self.log_format not in LOG_FORMATS:
            raise OptionError("log_format", f"is {self.log_format!r}; expected text or json")
