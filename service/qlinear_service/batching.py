"""What waits and what runs next: work items, batches and the queue between them, all pure.

The queue groups items by layer and dtypes, admits by rows, drops what is too late, and hands out
batches. It has no clock, no thread and no task: `batcher.py` drives it. Knows neither torch nor
grpc, and activations only as the name of a slot.
"""

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qlinear_service.dtypes import DType
from qlinear_service.errors import DeadlineExceeded, Overloaded, RequestError
from qlinear_service.slots import Slot

__all__ = ["Batch", "BatchKey", "Dropped", "Part", "WorkItem", "WorkQueue", "too_late"]

RETRY_AFTER_SECONDS = 0.1
"""As for a full slab: some tens of batches of a large layer."""


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
    """The caller's W3C trace context, for whoever traces batches."""


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


@dataclass(frozen=True, slots=True)
class Dropped:
    """An item that left the queue without its answer, and what to tell its caller."""

    item: WorkItem
    error: RequestError


class _Entry:
    """An item that waits, or the rest of one that exceeds a batch."""

    __slots__ = ("item", "next_row")

    def __init__(self, item: WorkItem) -> None:
        self.item = item
        self.next_row = 0


class _KeyQueue:
    """Entries of one key: first by priority, then in order of arrival."""

    __slots__ = ("by_priority", "turn")

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.by_priority: dict[int, OrderedDict[int, _Entry]] = {}

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is served first: the most urgent entry decides, then the time since a turn."""
        return -max(self.by_priority), self.turn

    def add(self, entry: _Entry) -> None:
        item = entry.item
        lane = self.by_priority.get(item.priority)
        if lane is None:
            lane = self.by_priority[item.priority] = OrderedDict()
        lane[item.sequence] = entry

    def remove(self, item: WorkItem) -> None:
        lane = self.by_priority[item.priority]
        del lane[item.sequence]
        if not lane:
            del self.by_priority[item.priority]

    def first(self) -> _Entry:
        lane = self.by_priority[max(self.by_priority)]
        return next(iter(lane.values()))


class WorkQueue:
    """Everything that waits. Owned by one task; every time is handed in.

    Args:
        max_batch_rows: most rows of one batch; an item with more is split over several.
        max_queue_rows: most rows that wait.
        max_age_seconds: longest wait of an item that has not begun to run.
    """

    def __init__(self, *, max_batch_rows: int, max_queue_rows: int, max_age_seconds: float) -> None:
        self.max_batch_rows = max_batch_rows
        self._max_queue_rows = max_queue_rows
        self._max_age_seconds = max_age_seconds
        self._rows = 0
        self._rows_by_layer: dict[str, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._keys: dict[BatchKey, _KeyQueue] = {}
        self._turns = itertools.count()
        self._expiries: list[tuple[float, int]] = []  # heap; entries that left are skipped

    def __contains__(self, item: WorkItem) -> bool:
        return item.sequence in self._entries

    @property
    def rows(self) -> int:
        """Rows that wait."""
        return self._rows

    def rows_by_layer(self) -> dict[str, int]:
        """Return the rows that wait for each layer that was ever asked for; from any thread."""
        return self._rows_by_layer.copy()

    def check_room(self, rows: int) -> None:
        """Raise Overloaded unless `rows` more may wait."""
        if self._rows + rows > self._max_queue_rows:
            raise Overloaded(
                f"{self._rows} rows wait and this call brings {rows}; at most "
                f"{self._max_queue_rows} may wait: send it again later",
                retry_after_seconds=RETRY_AFTER_SECONDS,
                reason="queue_rows",
            )

    def admit(self, items: Sequence[WorkItem]) -> float:
        """Let all `items` wait, or none; return when the first of them expires.

        Raises:
            Overloaded: they have more rows than there is room for.
        """
        rows = 0
        for item in items:
            rows += item.rows
        self.check_room(rows)
        first_expiry = math.inf
        for item in items:
            entry = self._entries[item.sequence] = _Entry(item)
            self._count(item.key.layer, item.rows)
            queue = self._keys.get(item.key)
            if queue is None:
                queue = self._keys[item.key] = _KeyQueue(next(self._turns))
            queue.add(entry)
            expiry = item.enqueued_at + self._max_age_seconds
            if item.deadline is not None and item.deadline < expiry:
                expiry = item.deadline
            heapq.heappush(self._expiries, (expiry, item.sequence))
            if expiry < first_expiry:
                first_expiry = expiry
        return first_expiry

    def cancel(self, item: WorkItem) -> None:
        """Take `item` out, or what of it has not begun to run; nothing happens if none waits."""
        entry = self._entries.get(item.sequence)
        if entry is not None:
            self._remove(entry)

    def has_begun(self, item: WorkItem) -> bool:
        """Say whether any row of `item` has been handed out, or it left in another way."""
        entry = self._entries.get(item.sequence)
        return entry is None or entry.next_row > 0

    def next_expiry(self) -> float | None:
        """Return when `expire` next has something to do, None if never."""
        while self._expiries and self._expiries[0][1] not in self._entries:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def expire(self, now: float) -> list[Dropped]:
        """Take out what is too late: past its deadline, or older than the largest age."""
        dropped = []
        while (expiry := self.next_expiry()) is not None and expiry <= now:
            entry = self._entries[heapq.heappop(self._expiries)[1]]
            item = entry.item
            if item.deadline is not None and item.deadline <= now:
                dropped.append(Dropped(item, too_late(item, now)))
            elif entry.next_row == 0:
                dropped.append(Dropped(item, self._too_old(item, now)))
            else:
                # It runs already, piece by piece: only its deadline can stop it.
                if item.deadline is not None:
                    heapq.heappush(self._expiries, (item.deadline, item.sequence))
                continue
            self._remove(entry)
        return dropped

    def take(self) -> Batch | None:
        """Return the next batch, None if nothing waits; call `expire` first.

        It has the key of the most urgent item or, among equals, the key that has waited longest
        for its turn, and all that waits under that key, as far as it fits.
        """
        if not self._keys:
            return None
        key = min(self._keys, key=lambda candidate: self._keys[candidate].rank)
        parts: list[Part] = []
        room = self.max_batch_rows
        while room and key in self._keys:
            entry = self._keys[key].first()
            left = entry.item.rows - entry.next_row
            # Only what exceeds a whole batch is cut; anything else waits for a batch that holds it.
            if left > room and entry.item.rows <= self.max_batch_rows:
                break
            rows = min(left, room)
            parts.append(Part(entry.item, entry.next_row, rows))
            room -= rows
            if rows == left:
                self._remove(entry)
            else:
                entry.next_row += rows
                self._count(key.layer, -rows)
        if key in self._keys:
            self._keys[key].turn = next(self._turns)
        return Batch(key, tuple(parts), self.max_batch_rows - room)

    def _remove(self, entry: _Entry) -> None:
        item = entry.item
        del self._entries[item.sequence]
        self._count(item.key.layer, entry.next_row - item.rows)
        queue = self._keys[item.key]
        queue.remove(item)
        if not queue.by_priority:
            del self._keys[item.key]

    def _count(self, layer: str, rows: int) -> None:
        self._rows += rows
        self._rows_by_layer[layer] = self._rows_by_layer.get(layer, 0) + rows

    def _too_old(self, item: WorkItem, now: float) -> RequestError:
        return Overloaded(
            f"the call for layer {item.key.layer!r} waited {now - item.enqueued_at:.3f} s, longer "
            f"than max_queue_age ({self._max_age_seconds:g} s): send it again later",
            retry_after_seconds=RETRY_AFTER_SECONDS,
            reason="queue_age",
        )


def too_late(item: WorkItem, now: float) -> RequestError:
    """Return what to tell the caller of an item whose deadline has passed."""
    return DeadlineExceeded(
        f"the deadline of the call for layer {item.key.layer!r} passed after it had waited "
        f"{now - item.enqueued_at:.3f} s; it was not computed"
    )
