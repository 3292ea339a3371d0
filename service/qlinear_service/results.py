"""What comes back: from the engine for a batch, from the batcher for each of its items."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from qlinear_service.errors import RequestError
from qlinear_service.tracing import BatchTrace

__all__ = ["Answer", "BatchResult", "Outcome"]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What the engine made of a batch: the result rows of each part, in order, as bytes."""

    rows: Sequence[memoryview]
    kernel_nanoseconds: int
    transfers: Sequence[tuple[str, int]] = ()
    """Copies on the way: the label `direction` of each, and its nanoseconds."""
    in_slots: bool = False
    """The rows lie in the slots of the items, and go with them."""
    launches: Sequence[tuple[str, int]] = ()
    """Where there are several devices: those that took part, and the nanoseconds of each."""
    is_timed: bool = True
    """If not, `kernel_nanoseconds` are those of another batch of the layer."""


class Outcome(NamedTuple):
    """One item's answer."""

    pieces: tuple[memoryview, ...]
    """Its result rows as bytes, in order; more than one piece if the item was split."""
    batch_rows: int
    """Rows of the largest batch that it was part of."""
    queue_nanoseconds: int
    """From its entry into the queue to its first batch."""
    kernel_nanoseconds: int
    """Of all batches that it was part of; of one that was not timed, what the layer's last one took
    that was."""
    batches: tuple[BatchTrace, ...] = ()
    """Those batches, if its call is traced."""


Answer: TypeAlias = list[Outcome] | RequestError
"""What a caller is told: one outcome for each layer asked for, in order; or what is wrong."""
