"""What metrics need to know of layers, queue and slab: shapes of values, no values and no torch.

`QuantizedLinear` fits `MeasuredLayer` as it is; tests hand in made-up ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from qlinear_service.roofline import Roofline

__all__ = ["Load", "MeasuredDevice", "MeasuredLayer", "MeasuredSpec", "Share", "Telemetry"]

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


class Share(NamedTuple):
    """What of a layer is on one device."""

    n: int
    """Output features."""
    streamed_bytes: int
    packed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """What metrics know of one device."""

    name: str
    """The label, e.g. "cuda:0"."""
    roofline: Roofline | None = None
    """What it was measured to do, None if it was not."""
    telemetry: Telemetry | None = None
    """What it says of itself; None where it says nothing."""
    tuned_bandwidths: tuple[tuple[str, int, float], ...] = ()
    """Shape, rows and bytes per second, as measured when plans were tuned."""
    shares: Mapping[str, Share] | None = None
    """The layers of which it holds something, by full name; None: it holds all of each."""

    def share_of(self, layer: MeasuredLayer) -> Share | None:
        """Return what of `layer` it holds; None if that is nothing."""
        if self.shares is None:
            return Share(layer.spec.n, layer.streamed_bytes, layer.packed_bytes)
        return self.shares.get(layer.spec.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a scrape asks the queue and the slab for; safe to call from any thread."""

    queue_rows: Callable[[], Mapping[str, int]]
    """Rows that wait, by full name of their layer."""
    inflight_bytes: Callable[[], int]
    queue_limit_bytes: int
