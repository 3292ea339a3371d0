"""What a client is set up with: default deadline, receive limit, channel options.

Values only; nothing here opens a channel. Each option has its reason beside it.
"""

from enum import Enum
from importlib.metadata import version
from typing import Final

__all__ = [
    "DEFAULT",
    "DEFAULT_MAX_RETRIES",
    "DEFAULT_RECEIVE_BYTES",
    "DEFAULT_TIMEOUT_SECONDS",
    "DEFAULT_TRANSPORT",
    "TRANSPORTS",
    "VERSION",
    "Default",
    "channel_options",
    "receive_bytes_for",
]

VERSION = version("qlinear")

DEFAULT_TIMEOUT_SECONDS = 5.0
"""A call without a deadline can hang for ever behind a dead network, so there always is one."""

TRANSPORTS = ("stream", "unary")

DEFAULT_TRANSPORT = "stream"

DEFAULT_MAX_RETRIES = 6
"""With the pauses between them about two seconds: longer than a server that drains refuses calls
before it hangs up, so that what is left of a call's attempts goes to the others."""


class Default(Enum):
    """The absence of a timeout argument; None already means "no deadline"."""

    DEFAULT = "the client's timeout"

    def __repr__(self) -> str:
        return self.name


DEFAULT: Final = Default.DEFAULT

FRAMING_BYTES = 1 << 20
"""Room above max_response_bytes, which counts result elements only, for shapes and timings."""

DEFAULT_RECEIVE_BYTES = (256 << 20) + FRAMING_BYTES
"""Fits a server with default limits, so that most clients never open a second channel."""


def receive_bytes_for(max_response_bytes: int) -> int:
    """Return the receive limit that lets every permitted response of a server through."""
    # gRPC keeps this limit in a signed 32-bit number.
    return min(max(DEFAULT_RECEIVE_BYTES, max_response_bytes + FRAMING_BYTES), (1 << 31) - 1)


def channel_options(receive_bytes: int) -> list[tuple[str, str | int]]:
    """Return the gRPC channel options of a client that accepts messages up to `receive_bytes`."""
    # Spread calls over all addresses that the name resolves to (replicas behind one name). Not with
    # gRPC's own health checking of them: with it the process crashed now and then, inside grpcio
    # 1.78.2, when a server went away.
    service_config = '{"loadBalancingConfig": [{"round_robin": {}}]}'
    return [
        ("grpc.primary_user_agent", f"qlinear-client/{VERSION}"),
        ("grpc.max_receive_message_length", receive_bytes),
        ("grpc.service_config", service_config),
        # When the server retires a connection, ask DNS again at once; the default of 30 s keeps
        # clients on old replicas.
        ("grpc.dns_min_time_between_resolutions_ms", 10_000),
        # A server that was away, for as long as it takes to load its models, is found within two or
        # three seconds of its return. By default the pauses grow to two minutes.
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Find out within 40 s, and between calls too, that a peer or a NAT entry is gone.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
