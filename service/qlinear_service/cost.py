"""What a batch of so many rows takes: a measured curve, and what follows from it.

Up to some tens of rows a layer costs one read of its weights, however many rows there are: where
that ends is the sweet spot. Pure arithmetic; `curves.py` measures.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

__all__ = ["TILE_EDGES", "CostCurve", "Steps"]

TILE_EDGES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rows at which kernels begin another tile, so that costs change behind them."""

MOST_SECONDS = 3600.0
"""Nothing that is served takes an hour: such a figure is damage, and endless sums would follow."""

SWEET_SPOT_COST = 1.10
"""Most that a batch at the sweet spot may cost, as a multiple of what one row costs."""


class Steps(NamedTuple):
    """What the steps of one batch took; they overlap with those of other batches."""

    rows: int
    copy_in_seconds: float
    kernel_seconds: float
    copy_out_seconds: float

    @property
    def seconds(self) -> float:
        """The longest of the steps: the time after which the next batch can follow."""
        return max(self.copy_in_seconds, self.kernel_seconds, self.copy_out_seconds)


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Costs of one kind of layer on one device, by ascending rows, from 1 row on."""

    steps: tuple[Steps, ...]

    def __post_init__(self) -> None:
        rows = [step.rows for step in self.steps]
        if rows[:1] != [1] or rows != sorted(set(rows)):
            raise ValueError(f"a cost curve has rows {rows}; expected ascending ones from 1 on")
        if not all(0 < step.kernel_seconds <= step.seconds < MOST_SECONDS for step in self.steps):
            raise ValueError(
                "a cost curve has a batch of no time, or of an hour or more; expected seconds"
            )

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The row counts that were measured."""
        return tuple(step.rows for step in self.steps)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """Seconds at each of `rows`: never more than what more rows were measured to take.

        Whatever else runs makes single measures longer and none shorter, and what many rows take
        is enough for fewer.
        """
        costs: list[float] = []
        for step in reversed(self.steps):
            costs.append(min(step.seconds, costs[-1]) if costs else step.seconds)
        return tuple(reversed(costs))

    def seconds(self, rows: int) -> float:
        """Return the cost of a batch: on the line between two measures, at the last rate beyond."""
        measured, costs = self.rows, self.costs
        above = bisect_left(measured, rows)
        if above == len(measured):
            return costs[-1] * rows / measured[-1]
        if measured[above] == rows or above == 0:
            return costs[above]
        share = (rows - measured[above - 1]) / (measured[above] - measured[above - 1])
        return costs[above - 1] + share * (costs[above] - costs[above - 1])

    @cached_property
    def sweet_spot_rows(self) -> int:
        """The most rows that cost at most a tenth more than one."""
        most = SWEET_SPOT_COST * self.costs[0]
        return max(m for m, cost in zip(self.rows, self.costs, strict=True) if cost <= most)

    @cached_property
    def capacity_rows_per_second(self) -> float:
        """Rows a second in batches of the sweet spot."""
        return self.sweet_spot_rows / self.seconds(self.sweet_spot_rows)
