"""How many rows the next batch takes, and whether to wait for more: pure functions of numbers.

The queue knows what waits, a `Pace` what batches of a layer cost. docs/scheduling.md explains the
rules. Knows no queue, no clock and no client.
"""

from collections.abc import Callable
from dataclasses import dataclass

from qlinear_service.cost import CostCurve

__all__ = ["BATCH_SECONDS", "Arrivals", "Pace", "pace_of", "rows_to_take", "unmeasured", "wait_end"]

BATCH_SECONDS = 100e-6
"""What a batch costs besides its computation: taking it and settling its calls (20 to 30 µs), a
thread and back (40), more wake-ups for fewer answers each. With 50 µs small unary calls cost a
tenth more processor time than in batches of all that waits, with this 3 %: docs/performance.md."""

CHUNK_COST = 1.25
"""Calls with more rows than the smallest batch whose rows cost at most so much more than those of
the best one may be cut: small calls overtake what is left."""

BEST_COST = 1.05
"""A batch whose rows cost at most so much more than those of the best one is large enough: a larger
one gains nothing, and whoever comes next waits for it."""

NO_GAIN = 1.15
"""Sums of waits that differ by less are the same, as more calls will come: then fewer batches are
better."""

UNMEASURED_ROW_SECONDS = 20e-6
"""What a row of a layer without a curve is charged, when clients share unevenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What batches of one layer cost, as the queue needs it."""

    sweet_rows: int
    """Rows that cost hardly more than one; at most the largest batch."""
    chunk_rows: int
    """Calls with more rows may be cut; at least the sweet spot, at most the largest batch."""
    most_rows: int
    """Of one batch: rows of larger ones cost no less."""
    row_seconds: float
    """What a row of a full batch takes: charged to its client."""
    sizes: tuple[tuple[int, float], ...] = ()
    """Rows worth weighing and their seconds, ascending from the sweet spot to `most_rows`."""
    seconds: Callable[[int], float] = lambda rows: BATCH_SECONDS + rows * UNMEASURED_ROW_SECONDS
    """What a batch takes with all that belongs to it."""


def unmeasured(most_rows: int) -> Pace:
    """Return the pace of a layer that nothing was measured of: full batches."""
    return Pace(
        sweet_rows=most_rows,
        chunk_rows=most_rows,
        most_rows=most_rows,
        row_seconds=UNMEASURED_ROW_SECONDS,
        sizes=((most_rows, BATCH_SECONDS + most_rows * UNMEASURED_ROW_SECONDS),),
    )


def pace_of(curve: CostCurve, most_rows: int, *, batch_seconds: float = BATCH_SECONDS) -> Pace:
    """Return the pace of a layer with a measured curve.

    Args:
        curve: what its computations take.
        most_rows: of one batch, as configured.
        batch_seconds: what each batch costs besides.
    """

    def seconds(rows: int) -> float:
        return curve.seconds(rows) + batch_seconds

    sweet = min(curve.sweet_spot_rows, most_rows)
    measured = {m for m in (*curve.rows, most_rows) if sweet <= m <= most_rows}
    sizes = sorted(measured | {sweet})
    best = min(seconds(m) / m for m in sizes)
    chunk, most = (
        next(m for m in sizes if seconds(m) / m <= times * best)
        for times in (CHUNK_COST, BEST_COST)
    )
    return Pace(
        sweet_rows=sweet,
        chunk_rows=chunk,
        most_rows=most,
        row_seconds=seconds(most) / most,
        sizes=tuple((m, seconds(m)) for m in sizes if m <= most),
        seconds=seconds,
    )


def rows_to_take(pace: Pace, waiting: int, others: int) -> int:
    """Return how many of the waiting rows the next batch should have.

    Up to the sweet spot rows are free. Beyond it a batch makes those who are in it and all others
    wait longer, and those behind it less long: of the sizes that were measured, and all of what
    waits, the one with the least sum of waits wins. With a short queue that is a batch with little
    more than the sweet spot, with an endless one that of the cheapest rows.

    Args:
        pace: of the layer.
        waiting: rows that wait for it, 1 or more.
        others: rows that wait for other layers.
    """
    if waiting <= pace.sweet_rows:
        return waiting
    found = [
        (rows, _waits(pace, rows, cost, waiting, others))
        for rows, cost in pace.sizes
        if rows < waiting
    ]
    if waiting <= pace.most_rows:
        found.append((waiting, (waiting + others) * pace.seconds(waiting)))
    most = NO_GAIN * min(waits for _, waits in found)
    return max(rows for rows, waits in found if waits <= most)


def _waits(pace: Pace, rows: int, cost: float, waiting: int, others: int) -> float:
    """Return the sum over rows of the time until each is done, in batches of `rows`."""
    batches, rest = divmod(waiting, rows)
    waits, drained = rows * cost * batches * (batches + 1) / 2, batches * cost
    if rest:
        drained += pace.seconds(rest)
        waits += rest * drained
    # Others wait for the first batch at least, at most for all: layers take turns.
    return waits + others * (cost + drained) / 2


class Arrivals:
    """How fast rows have come lately; every time is handed in, in seconds."""

    __slots__ = ("_gap", "_last")

    MEMORY = 0.1
    """Weight of the newest gap."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._gap: float | None = None

    def note(self, now: float, rows: int) -> None:
        """Count rows that come together."""
        if self._last is not None:
            gap = (now - self._last) / rows
            before = gap if self._gap is None else self._gap
            self._gap = before + self.MEMORY * (gap - before)
        self._last = now

    def row_gap(self, now: float) -> float | None:
        """Return the mean time between rows; a pause that goes on counts, too. None at first."""
        if self._gap is None or self._last is None:
            return None
        return max(self._gap, now - self._last)


def wait_end(
    *, oldest: float, waiting: int, sweet_rows: int, row_gap: float | None, most_seconds: float
) -> float:
    """Return until when an idle engine may wait for more rows; a time in the past: not at all.

    It pays only if rows come so fast that some would join: fewer than two in the longest wait are
    not worth it, and what fills the sweet spot is enough.

    Args:
        oldest: when the first of what waits came.
        waiting: rows that wait for one layer.
        sweet_rows: what they would be filled up to.
        row_gap: mean time between rows, None if unknown.
        most_seconds: the longest wait of any call.
    """
    if waiting >= sweet_rows or row_gap is None or 2 * row_gap > most_seconds:
        return oldest
    return oldest + min(most_seconds, (sweet_rows - waiting) * row_gap)
