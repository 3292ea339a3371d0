"""The series of metrics: plain numbers and buckets, found by their label values.

Each series has one writer, so counting takes no lock and a tenth of a microsecond (keeping values
and sorting them into buckets later takes as long in all, and would need a lock); `Family.collect`
copies them for a scrape from any thread. Which metrics there are is in `metric_families.py`.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar

__all__ = ["Family", "Histogram", "Number", "quantile"]


class Number:
    """One series of a counter or gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Histogram:
    """One series of a histogram."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Observations of each bucket alone; the last one has no bound."""
        self.exemplars: dict[int, Exemplar] = {}
        """By bucket, the last observation of it that belongs to a trace somebody keeps."""
        self.total = 0.0

    def observe(self, value: float, trace_id: str = "") -> None:
        """Count one observation; `trace_id` is that of the trace that shows it, if there is one."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id:
            self.exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def observe_all(self, values: Sequence[float]) -> None:
        """Count several observations at once."""
        bounds, counts = self.bounds, self.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)


def quantile(bounds: tuple[float, ...], counts: Iterable[int], q: float) -> float | None:
    """Return the q-quantile as Prometheus estimates it from buckets; None without observations."""
    cumulative = list(accumulate(counts))
    if not cumulative[-1]:
        return None
    rank = q * cumulative[-1]
    bucket = bisect_left(cumulative, rank)
    if bucket == len(bounds):
        return bounds[-1]
    low, before = (bounds[bucket - 1], cumulative[bucket - 1]) if bucket else (0.0, 0)
    return low + (bounds[bucket] - low) * (rank - before) / (cumulative[bucket] - before)


@dataclass(slots=True, eq=False)
class Family:
    """One metric and its series."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    labels: tuple[str, ...]
    text: str
    """The help line: how to read it."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without the last one, +Inf."""
    numbers: dict[tuple[str, ...], Number] = field(default_factory=dict)
    histograms: dict[tuple[str, ...], Histogram] = field(default_factory=dict)

    def number(self, *values: str) -> Number:
        """Return the series with these label values, made at its first use."""
        series = self.numbers.get(values)
        if series is None:
            series = self.numbers[values] = Number()
        return series

    def histogram(self, *values: str) -> Histogram:
        """Return the series with these label values, made at its first use.

        A scrape does not show it before its first observation.
        """
        series = self.histograms.get(values)
        if series is None:
            series = self.histograms[values] = Histogram(self.bounds)
        return series

    def collect(self, more: Iterable[tuple[tuple[str, ...], float]] = ()) -> Metric:
        """Return what a scrape shows: this family's series and, of a gauge, those of `more`."""
        if self.kind == "histogram":
            return self._collect_histograms()
        family = (
            CounterMetricFamily(self.name, self.text, labels=self.labels)
            if self.kind == "counter"
            else GaugeMetricFamily(self.name, self.text, labels=self.labels)
        )
        # list() of a dict runs no Python code, so a writer cannot come between.
        for values, number in list(self.numbers.items()):
            family.add_metric(values, number.value)
        for values, value in more:
            family.add_metric(values, value)
        return family

    def _collect_histograms(self) -> Metric:
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        bounds = [*(str(bound) for bound in self.bounds), "+Inf"]
        for values, histogram in list(self.histograms.items()):
            cumulative = list(accumulate(list(histogram.counts)))
            if not cumulative[-1]:
                continue  # looked up, and not used yet
            exemplars = map(histogram.exemplars.get, range(len(bounds)))
            buckets = [
                (bound, count) if exemplar is None else (bound, count, exemplar)
                for bound, count, exemplar in zip(bounds, cumulative, exemplars, strict=True)
            ]
            family.add_metric(values, buckets, histogram.total)
        return family
