"""Traces of calls and an engine that takes its time from a cost curve: schedulers without a clock.

Whole minutes of traffic pass in a moment, and in the same way each time. An engine computes one
batch at a time; a call's latency is from its arrival to the end of the batch with its last rows.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from qlinear_service.batching import Batch, BatchKey, Part, WorkItem, WorkQueue
from qlinear_service.dtypes import DType
from qlinear_service.scheduling import Pace
from qlinear_service.slots import Slot

NO_SLOT = Slot(0, 0)
AGE_SECONDS = 1e6  # nothing is dropped: policies are compared by what all calls waited


@dataclass(frozen=True)
class Call:
    """One call of a trace."""

    at: float
    """Seconds."""
    layer: str = "m/a"
    rows: int = 1
    client: str = ""
    priority: int = 0
    timeout: float | None = None
    """Seconds after `at`."""


def poisson(rate: float, seconds: float, seed: int, **kind: object) -> list[Call]:
    """Return calls that come at random, `rate` of them a second on average."""
    draw, now, calls = random.Random(seed), 0.0, []
    while (now := now + draw.expovariate(rate)) < seconds:
        calls.append(Call(at=now, **kind))  # type: ignore[arg-type]
    return calls


def bursts(rate: float, seconds: float, size: int, seed: int) -> list[Call]:
    """Return the same number of calls, `size` of them at a moment."""
    starts = poisson(rate / size, seconds, seed)
    return [Call(at=start.at) for start in starts for _ in range(size)]


def spread(calls: Sequence[Call], layers: int, seed: int) -> list[Call]:
    """Return the calls, each for one of so many layers."""
    draw = random.Random(seed)
    return [
        Call(c.at, f"m/l{draw.randrange(layers)}", c.rows, c.client, c.priority, c.timeout)
        for c in calls
    ]


def merged(*traces: Sequence[Call]) -> list[Call]:
    """Return the calls of all traces in order."""
    return sorted((call for trace in traces for call in trace), key=lambda call: call.at)


class Policy(Protocol):
    """What decides which calls are computed together, and when."""

    def admit(self, items: Sequence[WorkItem]) -> object:
        """Let items wait."""

    def take(self, now: float) -> Batch | None:
        """Return the next batch of a free engine; None: nothing yet."""

    def ready_at(self, now: float) -> float:
        """Return when to ask again after a None, if nothing comes before."""


class Ours(WorkQueue):
    """The server's queue."""

    def __init__(self, pace: Pace, *, max_wait_seconds: float = 0.0) -> None:
        super().__init__(
            max_batch_rows=pace.most_rows,
            max_queue_rows=1 << 40,
            max_age_seconds=AGE_SECONDS,
            paces=_Same(pace),
            max_wait_seconds=max_wait_seconds,
        )

    def ready_at(self, now: float) -> float:
        """Never: it gives what there is."""
        return math.inf


class _Same(dict[str, Pace]):
    """The same pace for every layer."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def get(self, key: str, default: object = None) -> Pace:
        return self._pace


class Fifo:
    """Strictly in order of arrival: a batch ends where a call for another layer comes."""

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self._waiting: deque[tuple[WorkItem, int]] = deque()  # with its next row

    def admit(self, items: Sequence[WorkItem]) -> None:
        """Let items wait."""
        self._waiting.extend((item, 0) for item in items)

    def take(self, now: float) -> Batch | None:
        """Return the first, and what follows it for the same layer."""
        return _taken(self._waiting, self._most_rows)

    def ready_at(self, now: float) -> float:
        """Never: it gives what there is."""
        return math.inf


class Window:
    """Waits until a layer's oldest call has waited for a fixed time, or its batch is full."""

    def __init__(self, most_rows: int, window_seconds: float) -> None:
        self._most_rows = most_rows
        self._window_seconds = window_seconds
        self._waiting: dict[BatchKey, deque[tuple[WorkItem, int]]] = {}

    def admit(self, items: Sequence[WorkItem]) -> None:
        """Let items wait."""
        for item in items:
            self._waiting.setdefault(item.key, deque()).append((item, 0))

    def take(self, now: float) -> Batch | None:
        """Return what waits for the layer that has waited longest, if it is ready."""
        if not self._waiting:
            return None
        key = min(self._waiting, key=self._ready_at)
        if now < self._ready_at(key):
            return None
        batch = _taken(self._waiting[key], self._most_rows)
        if not self._waiting[key]:
            del self._waiting[key]
        return batch

    def ready_at(self, now: float) -> float:
        """Return when the first layer is ready."""
        return min(map(self._ready_at, self._waiting), default=math.inf)

    def _ready_at(self, key: BatchKey) -> float:
        waiting = self._waiting[key]
        oldest = waiting[0][0].enqueued_at
        is_full = sum(item.rows for item, _ in waiting) >= self._most_rows
        return oldest if is_full else oldest + self._window_seconds


def _taken(waiting: deque[tuple[WorkItem, int]], most_rows: int) -> Batch | None:
    """Take the first call and those of its layer that follow, up to a full batch."""
    if not waiting:
        return None
    parts: list[Part] = []
    rows, key = 0, waiting[0][0].key
    while waiting and waiting[0][0].key == key and rows < most_rows:
        item, start = waiting.popleft()
        count = min(item.rows - start, most_rows - rows)
        parts.append(Part(item, start, count))
        rows += count
        if start + count < item.rows:
            waiting.appendleft((item, start + count))
    return Batch(key, tuple(parts), rows)


@dataclass
class Report:
    """What a policy made of a trace."""

    calls: list[Call] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """Seconds, of `calls`."""
    batch_rows: list[int] = field(default_factory=list)
    seconds: float = 0.0
    """From the first arrival to the last answer."""
    dropped: int = 0
    """Calls whose deadline passed."""

    def percentile(self, percent: float, wanted: Callable[[Call], bool] = lambda _: True) -> float:
        """Return one percentile of the latencies of some calls in seconds; NaN of none."""
        some = [x for call, x in zip(self.calls, self.latencies, strict=True) if wanted(call)]
        return float(np.percentile(some, percent)) if some else math.nan

    @property
    def rows_per_second(self) -> float:
        """Throughput."""
        return sum(self.batch_rows) / self.seconds

    @property
    def rows_per_batch(self) -> float:
        """Mean."""
        return sum(self.batch_rows) / len(self.batch_rows)


def simulate(policy: Policy, trace: Sequence[Call], seconds_of: Callable[[int], float]) -> Report:
    """Return what becomes of the calls of a trace, all of which are answered in the end.

    Args:
        policy: with nothing waiting.
        trace: in order.
        seconds_of: what a batch of so many rows takes.
    """
    report, now = Report(), 0.0
    arrivals: Iterator[Call] = iter(trace)
    upcoming = next(arrivals, None)
    asked: dict[int, Call] = {}
    left: dict[int, int] = {}
    while upcoming is not None or left:
        while upcoming is not None and upcoming.at <= now:
            item = _item(len(asked) + 1, upcoming)
            asked[item.sequence], left[item.sequence] = upcoming, item.rows
            policy.admit([item])
            upcoming = next(arrivals, None)
        if isinstance(policy, WorkQueue):
            for dropped in policy.expire(now):
                del left[dropped.item.sequence]
                report.dropped += 1
        batch = policy.take(now)
        if batch is None:
            next_arrival = math.inf if upcoming is None else upcoming.at
            now = min(next_arrival, policy.ready_at(now))
            if now == math.inf:
                break  # all that was left has been dropped
            continue
        now += seconds_of(batch.rows)
        report.batch_rows.append(batch.rows)
        for part in batch.parts:
            number = part.item.sequence
            left[number] -= part.rows
            if not left[number]:
                del left[number]
                report.calls.append(asked[number])
                report.latencies.append(now - asked[number].at)
    report.seconds = now - trace[0].at
    return report


def _item(sequence: int, call: Call) -> WorkItem:
    return WorkItem(
        sequence=sequence,
        key=BatchKey(call.layer, DType.F16, DType.F16),
        rows=call.rows,
        slot=NO_SLOT,
        nbytes=call.rows,
        enqueued_at=call.at,
        deadline=None if call.timeout is None else call.at + call.timeout,
        priority=call.priority,
        client=call.client,
    )
