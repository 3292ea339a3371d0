"""Counters and histograms between two moments: rates, means and quantiles of what happened then.

A snapshot copies the few families that are needed; a window is the difference of two. Knows the
families by name and no clock.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qlinear_service.metric_families import Family, quantile

__all__ = ["Snapshot", "Sums", "Window", "take"]

COUNTERS = (
    "qlinear_requests_total",
    "qlinear_rejected_total",
    "qlinear_expired_total",
    "qlinear_cancelled_total",
    "qlinear_kernel_bytes_total",
    "qlinear_kernel_busy_seconds_total",
)
HISTOGRAMS = (
    "qlinear_request_seconds",
    "qlinear_queue_seconds",
    "qlinear_transfer_seconds",
    "qlinear_reply_seconds",
    "qlinear_kernel_seconds",
    "qlinear_batch_rows",
    "qlinear_batch_requests",
)
SHORTEST_SECONDS = 1e-3
"""Of a window that is divided by: two looks may fall together."""

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Values since the start of the server, by family and label values."""

    at_seconds: float
    numbers: Mapping[str, Mapping[Labels, float]]
    histograms: Mapping[str, Mapping[Labels, tuple[list[int], float]]]
    """Counts of each bucket alone, and the sum of what was observed."""


def take(families: Mapping[str, Family], at_seconds: float) -> Snapshot:
    """Copy what windows need; from any thread.

    Args:
        families: all metrics by name.
        at_seconds: the time now, of any clock that does not go back.
    """
    return Snapshot(
        at_seconds,
        {
            # list() of a dict runs no Python code, so a writer cannot come between.
            name: {labels: one.value for labels, one in list(families[name].numbers.items())}
            for name in COUNTERS
        },
        {
            name: {
                labels: (list(one.counts), one.total)
                for labels, one in list(families[name].histograms.items())
            }
            for name in HISTOGRAMS
        },
    )


@dataclass(slots=True)
class Sums:
    """Observations of one histogram within a window."""

    bounds: tuple[float, ...]
    counts: list[int]
    """Of each bucket alone; the last one has no bound."""
    total: float = 0.0

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """None without observations."""
        return self.total / count if (count := self.count) else None

    def quantile(self, q: float) -> float | None:
        """Return the q-quantile as Prometheus estimates it; None without observations."""
        return quantile(self.bounds, self.counts, q)


class Window:
    """What happened between two snapshots of one server.

    Args:
        families: all metrics by name; their labels and bounds are used, not their values.
        before: the older snapshot.
        after: the younger one.
    """

    def __init__(self, families: Mapping[str, Family], before: Snapshot, after: Snapshot) -> None:
        self._families = families
        self._before = before
        self._after = after
        self.seconds = max(after.at_seconds - before.at_seconds, SHORTEST_SECONDS)

    def rates(self, name: str, label: str) -> dict[str, float]:
        """Return a counter's growth per second by the values of one label; what grew only."""
        key = self._key(name, label)
        before = self._before.numbers[name]
        rates: dict[str, float] = {}
        for labels, value in self._after.numbers[name].items():
            if grown := value - before.get(labels, 0.0):
                rates[key(labels)] = rates.get(key(labels), 0.0) + grown / self.seconds
        return rates

    def rate(self, name: str) -> float:
        """Return a counter's growth per second over all its series."""
        before = sum(self._before.numbers[name].values())
        return (sum(self._after.numbers[name].values()) - before) / self.seconds

    def sums(self, name: str, label: str) -> dict[str, Sums]:
        """Return a histogram's observations by the values of one label; where there were any."""
        key = self._key(name, label)
        before = self._before.histograms[name]
        bounds = self._families[name].bounds
        found: dict[str, Sums] = {}
        for labels, (counts, total) in self._after.histograms[name].items():
            old_counts, old_total = before.get(labels, ([0] * len(counts), 0.0))
            if counts == old_counts:
                continue
            sums = found.setdefault(key(labels), Sums(bounds, [0] * len(counts)))
            sums.counts = [
                sum_ + new - old
                for sum_, new, old in zip(sums.counts, counts, old_counts, strict=True)
            ]
            sums.total += total - old_total
        return found

    def all_sums(self, name: str) -> Sums:
        """Return a histogram's observations over all its series."""
        bounds = self._families[name].bounds
        return self.sums(name, "").get("", Sums(bounds, [0] * (len(bounds) + 1)))

    def _key(self, name: str, label: str) -> Callable[[Labels], str]:
        """Return what finds the value of a label; "" is in none, and joins all series."""
        if not label:
            return lambda _labels: ""
        place = self._families[name].labels.index(label)
        return lambda labels: labels[place]
