"""How the rows of a batch cross the bus: the one place with the rule, and why.

Two ways in and two ways out. *Gather*: one kernel reads the rows of all calls where they lie in the
slab. *Scatter*: one kernel writes results over them. *Copies*: the host brings rows together in
pinned memory, and the copy engines do the rest. Knows numbers only.
"""

from collections.abc import Callable
from typing import NamedTuple

from qlinear_service.config import TRANSFERS

__all__ = ["AUTO", "PINNED", "SLAB", "TABLE_ROWS", "Batched", "Way", "way_of"]

AUTO = TRANSFERS[0]
SLAB = TRANSFERS[1]
PINNED = TRANSFERS[2]

TABLE_ROWS = 1024
"""Rows whose addresses a stage has room for; larger batches come in copies of a few large pieces,
where there is nothing to gather."""

MOST_SCATTERED_BYTES = 256 * 1024
"""Results in slots are copied out by the event loop, before the slots are given back, at some 10
GB/s; those in pinned memory by a thread that waits for the batch anyway. So much takes 25
microseconds, which is what handing a batch to that thread and back costs."""

MOST_SCATTERED_ROWS = 32
"""Up to here scattering is faster whatever the row's length, as measured on an H200: 32 rows of
28,672 results in 247 us against 389, and more of them a second (decisions/0009). From 64 rows on
copying gives up to twice as many rows a second."""


class Way(NamedTuple):
    """How one batch travels."""

    gather: bool
    scatter: bool


class Batched(NamedTuple):
    """What the rule needs to know of a batch."""

    rows: int
    y_bytes: int
    can_gather: bool
    """The kernels see the slab, and can bring the layer's columns into their order."""
    can_scatter: Callable[[], bool]
    """Whether they see the slab, and each result has room in its slot, where nobody reads any more;
    asked only where it matters, as it takes a look at each slot."""


def way_of(batch: Batched, mode: str = AUTO) -> Way:
    """Return how a batch travels.

    Args:
        batch: what it is.
        mode: `slab` gathers and scatters whatever can be, `pinned` nothing, `auto` what is faster.
    """
    if mode == PINNED or batch.rows > TABLE_ROWS:
        return Way(gather=False, scatter=False)
    few = batch.rows <= MOST_SCATTERED_ROWS or batch.y_bytes <= MOST_SCATTERED_BYTES
    small = mode == SLAB or few
    return Way(gather=batch.can_gather, scatter=small and batch.can_scatter())
