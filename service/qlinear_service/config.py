"""Every knob of the server: frozen values grouped by owner, with their defaults and bounds.

Knows nothing of flags, environment or files: `config_sources.py` reads those and says where each
value came from. An owner is handed its own group and no other.
"""

from dataclasses import dataclass, field

from qlinear_service.config_fields import Group, OptionError, one_of, option
from qlinear_service.config_kernels import (
    AUTO,
    DEVICE_MODES,
    SPLIT,
    TRANSFERS,
    UNQUANTIZED,
    KernelConfig,
)
from qlinear_service.config_server import ServerConfig
from qlinear_service.config_tracing import TracingConfig

__all__ = [
    "AUTO",
    "DEVICE_MODES",
    "DISPATCHERS",
    "NATIVE",
    "PYTHON",
    "SMALLEST_SLOT_BYTES",
    "SPLIT",
    "TRANSFERS",
    "UNQUANTIZED",
    "BatchingConfig",
    "KernelConfig",
    "LimitsConfig",
    "OptionError",
    "ServerConfig",
    "ServiceConfig",
    "size_class",
]

MIB = 1 << 20
GIB = 1 << 30
PYTHON = "python"
NATIVE = "native"
DISPATCHERS = (AUTO, PYTHON, NATIVE)
"""What may bring calls together for one GPU."""

MOST_ROWS = (1 << 31) - 1  # messages carry the rows of a batch in 32 bits
MOST_MEMORY_BYTES = 1 << 46  # 64 TiB: more than any machine has, and far from overflow anywhere
SMALLEST_SLOT_BYTES = 1024


def size_class(nbytes: int) -> int:
    """Return the bytes of the slot that holds `nbytes`: the next power of two from 1 KiB."""
    return max(SMALLEST_SLOT_BYTES, 1 << max(nbytes - 1, 0).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig(Group):
    """What one call and the whole queue may hold. Owners: codec, slots, batching."""

    max_request_bytes: int = option(
        32 * MIB,
        "Most bytes of activations in one call. gRPC's own limit for a message is twice that.",
        minimum=1024,
        maximum=GIB - 1,
    )
    max_response_bytes: int = option(
        256 * MIB,
        "Most bytes of results of one call, computed from the shapes before anything runs.",
        minimum=1024,
        # protobuf cannot encode a message of 2 GiB or more.
        maximum=2 * GIB - MIB,
    )
    max_request_rows: int = option(
        65536, "Most rows of activations in one call.", minimum=1, maximum=MOST_ROWS
    )
    max_request_layers: int = option(
        256, "Most layers asked for in one call.", minimum=1, maximum=65536
    )
    max_queue_rows: int = option(
        262144,
        "Most rows that may wait; beyond it calls are told to come again.",
        minimum=1,
        maximum=MOST_ROWS,
    )
    max_queue_bytes: int = option(
        GIB,
        "Memory for calls that wait or run; beyond it calls are told to come again.",
        minimum=1024,
        maximum=MOST_MEMORY_BYTES,
    )
    max_queue_age_seconds: float = option(
        5.0,
        "Longest wait in seconds; a call that waited longer is dropped and told to come again.",
        name="max_queue_age",
        minimum=0.001,
        maximum=86400,
    )
    max_stream_calls: int = option(
        1024,
        "Most unanswered calls of one stream; beyond it the server stops reading the stream.",
        minimum=1,
        maximum=1 << 20,
    )
    max_stream_bytes: int = option(
        256 * MIB,
        "Memory for the answers of one stream until its client has read them; beyond it the "
        "server stops reading the stream. One call always fits. Of a connection's unary calls "
        "beyond it, those for large answers are told to come again.",
        minimum=1024,
        maximum=MOST_MEMORY_BYTES,
    )

    def __post_init__(self) -> None:
        Group.__post_init__(self)
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
class BatchingConfig(Group):
    """How calls become batches. Owner: batching."""

    max_batch_rows: int = option(
        1024,
        "Most rows of one batch. Larger batches use the device better and make others wait longer.",
        minimum=1,
        maximum=MOST_ROWS,
    )
    dispatcher: str = option(
        AUTO,
        "What brings calls together: native, threads without Python, for one GPU alone; python, "
        "as for CPUs and several GPUs; auto: native where it can be.",
        unit=one_of(DISPATCHERS),
    )
    max_batches_in_flight: int = option(
        0,
        "Batches that a GPU has at a time: one is copied while another is computed; 0 means 2, or "
        "3 with the native dispatcher.",
        unit="BATCHES",
        minimum=0,
        maximum=16,
    )
    max_wait_us: int = option(
        0,
        "Longest wait of an idle engine for more calls, in microseconds, where calls come so fast "
        "that it pays; 0: none. It keeps the event loop busy meanwhile.",
        unit="MICROSECONDS",
        minimum=0,
        maximum=200,
    )
    max_batch_seconds: float = option(
        60.0,
        "A batch that takes longer is taken for a device that hangs, and the process ends; 0: no "
        "time is too long.",
        minimum=0,
        maximum=86400,
    )

    def __post_init__(self) -> None:
        Group.__post_init__(self)
        if self.dispatcher not in DISPATCHERS:
            expected = ", ".join(DISPATCHERS)
            raise OptionError("dispatcher", f"is {self.dispatcher!r}; expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """All groups together, and what must hold between them. Only the composition root has this."""

    server: ServerConfig = field(default_factory=ServerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def __post_init__(self) -> None:
        names = self.kernels.device_names
        if self.batching.dispatcher == NATIVE and (len(names) > 1 or names == ("cpu",)):
            raise OptionError(
                "dispatcher",
                f"is {NATIVE!r}, which is for one GPU, and the device is {' and '.join(names)}; "
                f"expected {AUTO} or {PYTHON} there, or one GPU as --device cuda:N",
            )
