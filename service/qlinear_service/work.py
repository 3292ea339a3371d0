"""The descriptors that queue, batcher and engine pass on: one layer's work of a call, and batches.

Plain values: no queue, no clock, and activations only as the name of a slot.
"""

from dataclasses import dataclass
from typing import NamedTuple

from qlinear_service.dtypes import DType
from qlinear_service.slots import Slot

__all__ = ["Batch", "BatchKey", "Part", "WorkItem"]


class BatchKey(NamedTuple):
    """What items of one batch have in common. A tuple, as it is hashed several times a call."""

    layer: str
    """The full name."""
    x_dtype: DType
    output_dtype: DType


@dataclass(slots=True, kw_only=True, eq=False)
class WorkItem:
    """The descriptor of one layer's work for one call; times are seconds of one clock.

    Nobody changes one; it is not frozen because that would double what making it costs.
    """

    sequence: int
    """Unique among the items of this server; smaller is older."""
    key: BatchKey
    rows: int
    """Rows of activations, 1 or more."""
    slot: Slot
    """Where they lie, from the slot's first byte on."""
    nbytes: int
    enqueued_at: float
    deadline: float | None = None
    """Not to be computed at or after this."""
    priority: int = 0
    """Larger goes first."""
    traceparent: str | None = None
    """The W3C trace context of the call's own span; None if it is not traced."""
    client: str = ""
    """Whose it is, for sharing evenly."""


class Part(NamedTuple):
    """Rows `start` to `start + rows` of one item: all of it, unless the item exceeds a batch."""

    item: WorkItem
    start: int
    rows: int


class Batch(NamedTuple):
    """Parts of one key, in the order in which their rows follow each other."""

    key: BatchKey
    parts: tuple[Part, ...]
    rows: int
    """Rows of all parts together: the M of the computation."""
