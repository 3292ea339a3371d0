"""Who is owed what: calls that wait or run, each settled exactly once, each slot released once.

A call is one or more items that succeed or fail together. An item leaves when neither queue nor
engine will touch its slot again; that may be later than its caller's end. Event loop only; knows
neither torch nor grpc.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from qlinear_service.batching import Dropped
from qlinear_service.errors import Cancelled, RequestError
from qlinear_service.pending import Pending, PendingCall, Settle
from qlinear_service.refusals import too_late
from qlinear_service.results import BatchResult
from qlinear_service.tracing import BatchTrace
from qlinear_service.work import Batch, Part, WorkItem

__all__ = ["Ledger", "Queue"]


class Queue(Protocol):
    """What a ledger asks of the queue that it follows."""

    def __contains__(self, item: WorkItem) -> bool:
        """Say whether the queue has not let go of an item."""

    def cancel(self, item: WorkItem) -> None:
        """Take an item out, or what of it has not begun to run."""

    def has_begun(self, item: WorkItem) -> bool:
        """Say whether any row of an item has been handed out, or it left in another way."""

    def expire(self, now: float) -> list[Dropped]:
        """Take out what is too late."""


class Ledger:
    """The items of a queue and of the batches that were taken from it.

    Args:
        queue: what waits.
        release: told of each item once, when its slot is free.
    """

    def __init__(self, queue: Queue, release: Callable[[WorkItem], None]) -> None:
        self._queue = queue
        self._release = release
        self._pending: dict[int, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def enter(self, items: Sequence[WorkItem], settle: Settle) -> None:
        """Note a call whose items the queue has admitted."""
        call = PendingCall(items, settle)
        for item in items:
            self._pending[item.sequence] = Pending(item, call)

    def item(self, sequence: int) -> WorkItem:
        """Return an item that has not left."""
        return self._pending[sequence].item

    def look_at(self, item: WorkItem) -> None:
        """See whether `item` can leave, now that the queue has let go of it."""
        self._leave_if_unused(self._pending[item.sequence])

    def cancel(self, items: Sequence[WorkItem]) -> None:
        """Forget a call: what has not begun to run never will, and nobody is told of the rest."""
        for item in items:
            pending = self._pending.get(item.sequence)
            if pending is not None:
                pending.call.is_settled = True
                self._queue.cancel(item)
                self._leave_if_unused(pending)

    def withdraw(self, items: Sequence[WorkItem]) -> bool:
        """End a call of which nothing has begun to run as `Cancelled`; return whether it was so."""
        if any(self._queue.has_begun(item) for item in items):
            return False
        taken_back = Cancelled("the call was taken back before it ran")
        self._fail(self._pending[items[0].sequence].call, taken_back)
        return True

    def fail_all(self, error: RequestError) -> None:
        """End every call that has no answer yet with `error`."""
        for pending in list(self._pending.values()):
            self._fail(pending.call, error)

    def drop_expired(self, now: float) -> None:
        """End the calls of what has waited too long."""
        for dropped in self._queue.expire(now):
            # Gone already if another item of its call was dropped before it and failed the call.
            pending = self._pending.get(dropped.item.sequence)
            if pending is not None:
                self._fail(pending.call, dropped.error)

    def begin(self, batch: Batch, now: float) -> list[float]:
        """Note that the parts run from now on, so that no slot is released under the engine.

        Returns the seconds that each item whose first rows run has waited.
        """
        waits = []
        for part in batch.parts:
            pending = self._pending[part.item.sequence]
            pending.parts_running += 1
            if part.start == 0:
                # What came after the dispatcher's thread had read the clock has not waited.
                pending.queue_seconds = max(0.0, now - part.item.enqueued_at)
                waits.append(pending.queue_seconds)
        return waits

    def followers(self, batch: Batch) -> list[tuple[WorkItem, ...]]:
        """Return what the calls of a batch ask of their next layers: the items of each, in order.

        Nothing unless all of them ask for the same layers.
        """
        found = []
        for part in batch.parts:
            items = self._pending[part.item.sequence].call.items
            if len(items) == 1 or part.rows < part.item.rows:
                return []
            found.append(items[items.index(part.item) + 1 :])
        if len(set(map(len, found))) > 1:
            return []
        layers = list(zip(*found, strict=True))
        return layers if all(len({item.key for item in each}) == 1 for each in layers) else []

    def is_wanted(self, part: Part, now: float) -> bool:
        """Say whether anybody can use the result of a part that runs; if not, end it."""
        call = self._pending[part.item.sequence].call
        if part.item.deadline is not None and part.item.deadline <= now:
            self._fail(call, too_late(part.item, now))
        if call.is_settled:
            self.end_part(part)
            return False
        return True

    def finish(self, batch: Batch, result: BatchResult, trace: BatchTrace | None = None) -> None:
        """Hand out the results of a batch; `trace` is told to its calls, if any of them asked."""
        for part, piece in zip(batch.parts, result.rows, strict=True):
            item = part.item
            pending = self._pending[item.sequence]
            if result.in_slots and not pending.call.is_settled:
                piece = memoryview(bytes(piece))  # its slot may have another owner in a moment
            pending.pieces[part.start] = piece
            pending.rows_done += part.rows
            if batch.rows > pending.batch_rows:
                pending.batch_rows = batch.rows
            pending.kernel_nanoseconds += result.kernel_nanoseconds
            if trace is not None:
                pending.traces += (trace,)
            if pending.rows_done == item.rows:
                _complete(pending)
            pending.parts_running -= 1
            self._leave_if_unused(pending)

    def fail_part(self, part: Part, error: RequestError) -> None:
        """End the call of a part that ran, with `error`."""
        self._fail(self._pending[part.item.sequence].call, error)
        self.end_part(part)

    def end_part(self, part: Part) -> None:
        """Note that the engine is done with a part."""
        pending = self._pending[part.item.sequence]
        pending.parts_running -= 1
        self._leave_if_unused(pending)

    def _fail(self, call: PendingCall, error: RequestError) -> None:
        call.answer(error)
        self.cancel(call.items)

    def _leave_if_unused(self, pending: Pending) -> None:
        item = pending.item
        if not pending.parts_running and item not in self._queue:
            del self._pending[item.sequence]
            self._release(item)


def _complete(pending: Pending) -> None:
    """Answer the call if this item was the last of it."""
    call, outcome = pending.call, pending.outcome()
    if len(call.items) == 1:
        call.answer([outcome])
        return
    call.outcomes[pending.item.sequence] = outcome
    if len(call.outcomes) == len(call.items):
        call.answer([call.outcomes[item.sequence] for item in call.items])
