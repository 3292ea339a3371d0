"""Entries that wait, in the order in which they are to be served, as far as that is asked for.

More urgent ones first; of those the clients in the earliest round; of those what is due first, then
what came first. Rounds of clients and places of entries change while they wait, so ranks are heaps
whose stale records are dropped when they come up. Pure.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

from qlinear_service.fairness import Share
from qlinear_service.work import WorkItem

__all__ = ["Entry", "Waiting"]

SPARE_RECORDS = 64
"""Stale records that are not worth a new ranking."""


class Entry:
    """An item that waits, or the rest of one that is computed in pieces."""

    __slots__ = ("due", "is_gone", "item", "next_row", "share", "since", "version")

    def __init__(self, item: WorkItem, share: Share, due: float) -> None:
        self.item = item
        self.share = share
        self.due = due
        """Earlier is served first."""
        self.since = item.enqueued_at
        """When it came, or its last piece was taken."""
        self.next_row = 0
        self.version = 0
        self.is_gone = False

    @property
    def rows_left(self) -> int:
        """Rows that have not been handed out."""
        return self.item.rows - self.next_row


Record: TypeAlias = tuple[float, int, int, Entry]
"""due, sequence, version, entry: no two are equal in the first three."""


class Waiting:
    """Some of what waits: in order of arrival, and ranked once that is asked for.

    Most batches take all that waits for one layer, and nobody needs to know its order.
    """

    __slots__ = ("_entries", "_levels", "_records", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._levels: dict[int, _Level] | None = None
        self._records = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._entries

    def get(self, sequence: int) -> Entry | None:
        """Return one entry, None if it does not wait."""
        return self._entries.get(sequence)

    def all(self) -> Iterable[Entry]:
        """Return all entries, those first that have waited longest for anything to happen."""
        return self._entries.values()

    def oldest(self) -> Entry:
        """Return the one that has waited longest; there is one."""
        return next(iter(self._entries.values()))

    def add(self, entry: Entry) -> None:
        """Take in a new one."""
        self._entries[entry.item.sequence] = entry
        self.rows += entry.rows_left
        self._note(entry)

    def remove(self, entry: Entry) -> None:
        """Take one out; its owner marks it as gone."""
        del self._entries[entry.item.sequence]
        self.rows -= entry.rows_left
        if not self._entries:
            self._levels = None

    def moved(self, entry: Entry, rows: int) -> None:
        """Note that so many rows were handed out and the rest has another place."""
        self.rows -= rows
        self._entries.move_to_end(entry.item.sequence)
        self._note(entry)

    def first(self) -> Entry:
        """Return the one to serve next; there is one."""
        levels = self._levels
        if levels is None:
            levels = self._levels = {}
            self._records = 0
            for entry in self._entries.values():
                self._rank(entry)
        while True:
            priority = max(levels)
            entry_or_none = levels[priority].first()
            if entry_or_none is not None:
                return entry_or_none
            del levels[priority]

    def _note(self, entry: Entry) -> None:
        """Give an entry its new place, if places are known.

        They are forgotten once most are stale: it may be long until somebody asks again.
        """
        if self._records > 2 * len(self._entries) + SPARE_RECORDS:
            self._levels, self._records = None, 0
        if self._levels is not None:
            self._rank(entry)

    def _rank(self, entry: Entry) -> None:
        assert self._levels is not None, "only where entries are ranked"
        level = self._levels.get(entry.item.priority)
        if level is None:
            level = self._levels[entry.item.priority] = _Level()
        level.add(entry)
        self._records += 1


class _Lane:
    """Entries of one client and priority."""

    __slots__ = ("head", "records")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.head: tuple[int, Record] | None = None
        """Its one valid record among the heads of its level."""


class _Level:
    """Entries of one priority."""

    __slots__ = ("_heads", "_lanes")

    def __init__(self) -> None:
        self._lanes: dict[Share, _Lane] = {}
        self._heads: list[tuple[int, Record]] = []  # heap of (round, first record) of lanes

    def add(self, entry: Entry) -> None:
        lane = self._lanes.get(entry.share)
        if lane is None:
            lane = self._lanes[entry.share] = _Lane()
        record = (entry.due, entry.item.sequence, entry.version, entry)
        heapq.heappush(lane.records, record)
        if lane.records[0] is record:
            lane.head = (entry.share.round, record)
            heapq.heappush(self._heads, lane.head)

    def first(self) -> Entry | None:
        """Return the entry to serve next, None if all have left."""
        heads = self._heads
        while heads:
            head = heads[0]
            share = head[1][3].share
            lane = self._lanes.get(share)
            if lane is None or lane.head is not head:
                heapq.heappop(heads)  # another one has taken its place
                continue
            records = lane.records
            while records and (records[0][3].is_gone or records[0][3].version != records[0][2]):
                heapq.heappop(records)
            if not records:
                heapq.heappop(heads)
                del self._lanes[share]
            elif records[0] is head[1] and head[0] == share.round:
                return records[0][3]
            else:
                lane.head = (share.round, records[0])
                heapq.heapreplace(heads, lane.head)
        return None
