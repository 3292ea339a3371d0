"""What gRPC is told when the data port opens: sizes, keepalive, and how long connections live."""

import random
from typing import Any

from qlinear_service.config import ServiceConfig

__all__ = ["channel_options", "max_stream_seconds"]

STREAM_SHARE = 0.8
"""Of a connection's age: when a stream's client is told to open a new one, so that connections
that are told to end run empty in time."""


def max_stream_seconds(max_connection_seconds: float) -> float:
    """Return the age at which a stream's client is told to open a new one."""
    return STREAM_SHARE * max_connection_seconds


def channel_options(config: ServiceConfig) -> list[tuple[str, Any]]:
    """Return the options of the server's gRPC."""
    limits, max_connection_seconds = config.limits, config.server.max_connection_seconds
    # Connections end now and then, or clients would never look for new servers; spread out, or
    # all of them would look at once.
    max_connection_age_ms = round(1000 * max_connection_seconds * random.uniform(0.9, 1.1))
    stream_ms = round(1000 * max_stream_seconds(max_connection_seconds))
    return [
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        # The answer's data and the message around it.
        ("grpc.max_send_message_length", limits.max_response_bytes + (1 << 20)),
        # A second server on the same port is a mistake here, not a way to share it.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", 1024),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may ping every 10 s, by their own clocks; the default of 300 s hangs up on them.
        ("grpc.http2.min_ping_interval_without_data_ms", 9_000),
        ("grpc.max_connection_age_ms", max_connection_age_ms),
        # Longer than a stream lives, so that none is ever cut off.
        ("grpc.max_connection_age_grace_ms", stream_ms + 30_000),
    ]
