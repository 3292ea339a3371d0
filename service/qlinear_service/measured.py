"""What metrics need to know of layers, queue and slab: shapes of values, no values and no torch.

`QuantizedLinear` fits `MeasuredLayer` as it is; tests hand in made-up ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

__all__ = ["Load", "MeasuredLayer", "MeasuredSpec", "Telemetry"]

Telemetry: TypeAlias = Callable[[], Mapping[tuple[str, ...], float]]
"""What a device says of itself: the name of a metric and its labels behind `device` -> value. Safe
to call from any thread, and never waits for the device."""


class MeasuredSpec(Protocol):
    """What metrics know of a layer's shape."""

    @property
    def name(self) -> str:
        """The full name."""

    @property
    def module(self) -> str:
        """The name that calls may use where one model only has it."""

    @property
    def shape(self) -> str:
        """The label, e.g. "k4096_n28672_b4_g128"."""

    @property
    def n(self) -> int:
        """Output features."""

    @property
    def k(self) -> int:
        """Input features."""


class MeasuredLayer(Protocol):
    """What metrics know of a layer."""

    @property
    def spec(self) -> MeasuredSpec:
        """Name and shape."""

    @property
    def streamed_bytes(self) -> int:
        """Bytes of codes, scales and zero points: what each computation reads."""

    @property
    def packed_bytes(self) -> int:
        """Bytes of all tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a scrape asks the queue and the slab for; safe to call from any thread."""

    queue_rows: Callable[[], Mapping[str, int]]
    """Rows that wait, by full name of their layer."""
    inflight_bytes: Callable[[], int]
    queue_limit_bytes: int
