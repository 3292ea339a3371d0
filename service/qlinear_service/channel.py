"""What gRPC is told when the data port opens: sizes, keepalive, and how long connections live."""

import random
from typing import Any

from qlinear_service.config import LimitsConfig

__all__ = ["MAX_STREAM_AGE_SECONDS", "channel_options"]

MAX_STREAM_AGE_SECONDS = 240.0
"""When a stream's client is told to open a new one, so that old connections run empty in time."""


def channel_options(limits: LimitsConfig) -> list[tuple[str, Any]]:
    """Return the options of a server that takes calls up to `limits`."""
    # Connections end now and then, or clients would never look for new servers; spread out, or
    # all of them would look at once.
    max_connection_age_ms = round(300_000 * random.uniform(0.9, 1.1))
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
        ("grpc.max_connection_age_grace_ms", round(MAX_STREAM_AGE_SECONDS * 1000) + 30_000),
    ]
