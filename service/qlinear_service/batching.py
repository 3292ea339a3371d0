"""What waits and what runs next: the queue between calls and batches, pure.

It groups items by layer and dtypes, admits by rows, drops what is too late, and hands out batches:
`scheduling.py` says how large, `lanes.py` and `fairness.py` whose. It has no clock, no thread and
no task: `batcher.py` drives it. Knows neither torch nor grpc.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qlinear_service.errors import RequestError
from qlinear_service.fairness import Shares
from qlinear_service.lanes import Entry, Waiting
from qlinear_service.refusals import check_rows, too_late, too_old
from qlinear_service.scheduling import Arrivals, Pace, rows_to_take, unmeasured, wait_end
from qlinear_service.work import Batch, BatchKey, Part, WorkItem

__all__ = ["Batch", "BatchKey", "Dropped", "Part", "WorkItem", "WorkQueue"]

PATIENCE = 0.5
"""Of the largest age: what has waited so long for its turn, or for its next piece, may go before
everything else, whatever others' priorities and deadlines are."""

TURNS_OF_OTHERS = 3
"""Batches between two such ones: when all has waited long, clients still share evenly."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """An item that left the queue without its answer, and what to tell its caller."""

    item: WorkItem
    error: RequestError


class WorkQueue:
    """Everything that waits. Owned by one task; every time is handed in.

    Args:
        max_batch_rows: most rows of one batch; an item with more is split over several.
        max_queue_rows: most rows that wait.
        max_age_seconds: longest wait of an item that has not begun to run.
        paces: by full name, what batches of a layer cost; layers that are not in it get batches as
            full as they can be.
        max_wait_seconds: longest wait for more rows while nothing runs.
    """

    def __init__(
        self,
        *,
        max_batch_rows: int,
        max_queue_rows: int,
        max_age_seconds: float,
        paces: Mapping[str, Pace] | None = None,
        max_wait_seconds: float = 0.0,
    ) -> None:
        self.max_batch_rows = max_batch_rows
        self._max_queue_rows = max_queue_rows
        self._max_age_seconds = max_age_seconds
        self._paces = {} if paces is None else paces
        self._unmeasured = unmeasured(max_batch_rows)
        self._max_wait_seconds = max_wait_seconds
        self._arrivals = Arrivals()
        self._rows_by_layer: dict[str, int] = {}
        self._waiting = Waiting()
        self._keys: dict[BatchKey, Waiting] = {}
        self._shares = Shares()
        self._turns_of_others = 0
        self._expiries: list[tuple[float, int]] = []  # heap; entries that left are skipped

    def __contains__(self, item: WorkItem) -> bool:
        return item.sequence in self._waiting

    @property
    def rows(self) -> int:
        """Rows that wait."""
        return self._waiting.rows

    def rows_by_layer(self) -> dict[str, int]:
        """Return the rows that wait for each layer that was ever asked for; from any thread."""
        return self._rows_by_layer.copy()

    def check_room(self, rows: int) -> None:
        """Raise Overloaded unless `rows` more may wait."""
        check_rows(self.rows, rows, self._max_queue_rows)

    def admit(self, items: Sequence[WorkItem]) -> float:
        """Let all `items` wait, or none; return when the first of them expires.

        Raises:
            Overloaded: they have more rows than there is room for.
        """
        rows = 0
        for item in items:
            rows += item.rows
        self.check_room(rows)
        if self._max_wait_seconds:
            self._arrivals.note(items[0].enqueued_at, rows)
        first_expiry = math.inf
        for item in items:
            expiry = item.enqueued_at + self._max_age_seconds
            if item.deadline is not None and item.deadline < expiry:
                expiry = item.deadline
            entry = Entry(item, self._shares.enter(item.client), expiry)
            self._waiting.add(entry)
            self._count(item.key.layer, item.rows)
            queue = self._keys.get(item.key)
            if queue is None:
                queue = self._keys[item.key] = Waiting()
            queue.add(entry)
            heapq.heappush(self._expiries, (expiry, item.sequence))
            if expiry < first_expiry:
                first_expiry = expiry
        return first_expiry

    def cancel(self, item: WorkItem) -> None:
        """Take `item` out, or what of it has not begun to run; nothing happens if none waits."""
        entry = self._waiting.get(item.sequence)
        if entry is not None:
            self._remove(entry)

    def has_begun(self, item: WorkItem) -> bool:
        """Say whether any row of `item` has been handed out, or it left in another way."""
        entry = self._waiting.get(item.sequence)
        return entry is None or entry.next_row > 0

    def next_expiry(self) -> float | None:
        """Return when `expire` next has something to do, None if never."""
        while self._expiries and self._expiries[0][1] not in self._waiting:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def expire(self, now: float) -> list[Dropped]:
        """Take out what is too late: past its deadline, or older than the largest age."""
        dropped = []
        while (expiry := self.next_expiry()) is not None and expiry <= now:
            entry = self._waiting.get(heapq.heappop(self._expiries)[1])
            assert entry is not None, "next_expiry skips what has left"
            item = entry.item
            if item.deadline is not None and item.deadline <= now:
                dropped.append(Dropped(item, too_late(item, now)))
            elif entry.next_row == 0:
                dropped.append(Dropped(item, too_old(item, now, self._max_age_seconds)))
            else:
                # It runs already, piece by piece: only its deadline can stop it.
                if item.deadline is not None:
                    heapq.heappush(self._expiries, (item.deadline, item.sequence))
                continue
            self._remove(entry)
        return dropped

    def wait_end(self, now: float) -> float:
        """Return until when an idle engine may wait for more rows; not after now: take at once."""
        if not self._max_wait_seconds or len(self._keys) != 1:
            return now  # with several layers there is work for the meantime
        (key,) = self._keys
        return wait_end(
            oldest=self._waiting.oldest().since,
            waiting=self.rows,
            sweet_rows=self._pace(key).sweet_rows,
            row_gap=self._arrivals.row_gap(now),
            most_seconds=self._max_wait_seconds,
        )

    def take(self, now: float) -> Batch | None:
        """Return the next batch, None if nothing waits; call `expire` first.

        It has the key of the item that is to be served next, and of what waits under that key as
        much as the next batch should have.
        """
        if not self._keys:
            return None
        if len(self._keys) == 1:
            # Mostly all of it is taken, and nobody needs to know its order.
            (key,) = self._keys
            queue, pace = self._keys[key], self._pace(key)
            if rows_to_take(pace, queue.rows, 0) == queue.rows:
                self._shares.serve(self._waiting.oldest().share)
                return self._take_all(key, queue, pace)
        first = self._next(now)
        self._shares.serve(first.share)
        key = first.item.key
        queue, pace = self._keys[key], self._pace(key)
        room = rows_to_take(pace, queue.rows, self.rows - queue.rows)
        # What is not cut must fit.
        room = max(room, min(first.rows_left, pace.chunk_rows))
        if queue.rows <= room:
            return self._take_all(key, queue, pace)
        parts: list[Part] = []
        rows, entry = 0, first
        while True:
            count = min(entry.rows_left, room - rows)
            # Only large calls are cut; anything else waits for a batch that holds it.
            if count < entry.rows_left and entry.item.rows <= pace.chunk_rows:
                break
            parts.append(Part(entry.item, entry.next_row, count))
            rows += count
            entry.share.charge(count * pace.row_seconds)
            if count == entry.rows_left:
                self._remove(entry)
            else:
                self._cut(entry, count, now + pace.seconds(rows))
            if rows == room:
                break
            entry = queue.first()
        return Batch(key, tuple(parts), rows)

    def take_together(self, items: Sequence[WorkItem]) -> Batch | None:
        """Return a batch of exactly these items of one key; None unless all wait whole."""
        key, rows = items[0].key, sum(item.rows for item in items)
        if rows > self.max_batch_rows or any(self.has_begun(item) for item in items):
            return None
        entries = [entry for item in items if (entry := self._waiting.get(item.sequence))]
        return self._take_entries(key, entries, rows, self._pace(key))

    def _next(self, now: float) -> Entry:
        """Return the entry that is to be served next; there is one."""
        oldest = self._waiting.oldest()
        if len(self._waiting) == 1:
            return oldest
        is_long = now - oldest.since > PATIENCE * self._max_age_seconds
        if is_long and self._turns_of_others >= TURNS_OF_OTHERS:
            self._turns_of_others = 0
            return oldest
        self._turns_of_others += 1
        if len(self._keys) == 1:
            return self._keys[oldest.item.key].first()
        return self._waiting.first()

    def _take_all(self, key: BatchKey, queue: Waiting, pace: Pace) -> Batch:
        """Return all that waits under a key, in order of arrival."""
        return self._take_entries(key, list(queue.all()), queue.rows, pace)

    def _take_entries(
        self, key: BatchKey, entries: Sequence[Entry], rows: int, pace: Pace
    ) -> Batch:
        parts, row_seconds = [], pace.seconds(rows) / rows
        for entry in entries:
            parts.append(Part(entry.item, entry.next_row, entry.rows_left))
            entry.share.charge(entry.rows_left * row_seconds)
            self._remove(entry)
        return Batch(key, tuple(parts), rows)

    def _cut(self, entry: Entry, rows: int, done_at: float) -> None:
        """Hand out the next rows of a large item; the rest waits as if it came when they are done.

        So what comes until then overtakes it, and it overtakes what comes later.
        """
        entry.next_row += rows
        entry.since = done_at
        entry.due = done_at + self._max_age_seconds
        entry.version += 1
        self._waiting.moved(entry, rows)
        self._keys[entry.item.key].moved(entry, rows)
        self._count(entry.item.key.layer, -rows)

    def _remove(self, entry: Entry) -> None:
        item, left = entry.item, entry.rows_left
        self._waiting.remove(entry)
        queue = self._keys[item.key]
        queue.remove(entry)
        if not len(queue):
            del self._keys[item.key]
        entry.is_gone = True
        self._shares.leave(entry.share)
        self._count(item.key.layer, -left)

    def _pace(self, key: BatchKey) -> Pace:
        return self._paces.get(key.layer, self._unmeasured)

    def _count(self, layer: str, rows: int) -> None:
        self._rows_by_layer[layer] = self._rows_by_layer.get(layer, 0) + rows
