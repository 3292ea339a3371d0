"""Every knob of the server: frozen values grouped by owner, with their defaults and bounds.

Knows nothing of flags, environment or files: `config_sources.py` reads those and says where each
value came from. An owner is handed its own group and no other.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from qlinear_service.config_fields import Group, OptionError, computed_option, option
from qlinear_service.config_server import ServerConfig
from qlinear_service.config_tracing import TracingConfig
from qlinear_service.kernels.build import default_cache_dir

__all__ = [
    "AUTO",
    "SMALLEST_SLOT_BYTES",
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
MOST_ROWS = (1 << 31) - 1  # messages carry the rows of a batch in 32 bits
MOST_MEMORY_BYTES = 1 << 46  # 64 TiB: more than any machine has, and far from overflow anywhere
MOST_THREADS = 1024  # more than the cores of any machine; tens of thousands crash OpenMP
SMALLEST_SLOT_BYTES = 1024
AUTO = "auto"
UNQUANTIZED = (AUTO, "skip", "keep", "rtn", "mse")
"""What may become of the layers that a checkpoint holds unquantized."""

TRANSFERS = ("auto", "slab", "pinned")
"""How rows may get to a GPU and back."""


def size_class(nbytes: int) -> int:
    """Return the bytes of the slot that holds `nbytes`: the next power of two from 1 KiB."""
    return max(SMALLEST_SLOT_BYTES, 1 << max(nbytes - 1, 0).bit_length())


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), MOST_THREADS)
    return min(os.cpu_count() or 1, MOST_THREADS)


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
    max_batches_in_flight: int = option(
        0,
        "Batches that a GPU has at a time: one is copied while another is computed; 0 means 2.",
        minimum=0,
        maximum=16,
    )
    max_wait_us: int = option(
        0,
        "Longest wait of an idle engine for more calls, in microseconds, where calls come so fast "
        "that it pays; 0: none. It keeps the event loop busy meanwhile.",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig(Group):
    """Where and with what layers are computed. Owners: loading, kernels."""

    device: str = option(
        AUTO, "Device that computes: cpu, cuda:N, or auto: cuda:0 if it can be used, else cpu."
    )
    batch_invariant: bool = option(
        False, "No bit of a row's result depends on the other rows of its batch; may be slower."
    )
    cpu_threads: int = computed_option(
        _usable_cores,
        "Most threads of one CPU computation; default: all usable cores.",
        minimum=1,
        maximum=MOST_THREADS,
    )
    cache_dir: Path = computed_option(  # noqa: RUF009 - a field specifier
        default_cache_dir, "Folder of built kernels and measured costs; may be read-only or absent."
    )
    measure_seconds: float = option(
        10.0,
        "Longest time at the first start to measure what batches of each shape cost; kept in the "
        "cache folder. 0 measures nothing.",
        minimum=0,
        maximum=600,
    )
    transfers: str = option(
        "auto",
        "How rows get to a GPU and back: slab, kernels read and write where calls lie; pinned, "
        "copies through pinned buffers; auto, whichever is faster for the batch.",
    )
    unquantized: str = option(
        AUTO,
        "What becomes of layers that a checkpoint holds unquantized: skip; keep: multiply through "
        "torch; rtn or mse: quantize them here to 4 bits; auto: rtn if no layer is quantized, "
        "else skip.",
    )
    torch_only: bool = option(
        False, "Compute with plain torch and build no kernels: right, and slow."
    )

    def __post_init__(self) -> None:
        Group.__post_init__(self)
        kind, colon, index = self.device.partition(":")
        is_cuda = kind == "cuda" and colon and index.isdecimal() and len(index) < 4
        if self.device not in ("cpu", AUTO) and not is_cuda:
            problem = f"is {self.device!r}; expected cpu or cuda:N, as in cuda:0, or {AUTO}"
            raise OptionError("device", problem)
        if self.unquantized not in UNQUANTIZED:
            choices = ", ".join(UNQUANTIZED)
            raise OptionError("unquantized", f"is {self.unquantized!r}; expected {choices}")
        if self.transfers not in TRANSFERS:
            choices = ", ".join(TRANSFERS)
            raise OptionError("transfers", f"is {self.transfers!r}; expected {choices}")
        if self.torch_only and is_cuda:
            raise OptionError("torch_only", f"is true, and that is for the CPU, not {self.device}")

    @property
    def cuda_ordinal(self) -> int | None:
        """Which GPU is asked for; None for the CPU and for auto."""
        return int(self.device.partition(":")[2]) if self.device.startswith("cuda") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """All groups together. Only the composition root holds this."""

    server: ServerConfig = field(default_factory=ServerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
