"""Drives the queue: runs a batch the moment the engine has room, and settles calls.

Everything here happens on the event loop; the computation is behind `run_batch`, which is handed
in. A call is one or more items that succeed or fail together. Knows neither torch nor grpc.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from qlinear_service.batching import Batch, Part, WorkItem, WorkQueue, too_late
from qlinear_service.errors import Cancelled, EngineFailure, EngineLost, RequestError, Unavailable
from qlinear_service.in_flight import InFlight
from qlinear_service.log_values import quoted
from qlinear_service.metrics import Metrics
from qlinear_service.pending import Pending, PendingCall, Settle
from qlinear_service.results import BatchResult

__all__ = ["Batcher", "RunBatch"]

logger = logging.getLogger(__name__)


RunBatch: TypeAlias = Callable[[Batch], Awaitable[BatchResult]]


class Batcher:
    """The one owner of the queue; call it from the event loop's thread only.

    Args:
        queue: what waits.
        run_batch: computes a batch; may fail in any way.
        release: told of each item exactly once, when neither queue nor engine will touch its
            slot again. That may be later than its caller's end.
        clock: seconds, the clock of the items' times and of the loop's timers.
        metrics: told of each batch.
        most_running: batches that may be with the engine at a time.
    """

    def __init__(
        self,
        *,
        queue: WorkQueue,
        run_batch: RunBatch,
        release: Callable[[WorkItem], None],
        clock: Callable[[], float],
        metrics: Metrics,
        most_running: int = 1,
    ) -> None:
        self._queue = queue
        self._run_batch = run_batch
        self._release = release
        self._clock = clock
        self._metrics = metrics
        self._pending: dict[int, Pending] = {}
        self._wake = asyncio.Event()
        self._in_flight = InFlight(most_running, on_fault=self._wake.set)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def items_held(self) -> int:
        """Items that wait or run, those of callers that have left included."""
        return len(self._pending)

    def check_room(self, rows: int) -> None:
        """Raise Overloaded unless `rows` more may wait."""
        self._queue.check_room(rows)

    def submit(self, items: Sequence[WorkItem], settle: Settle) -> None:
        """Queue the items of one call; `settle` is told their outcomes, in order, or an error.

        The first item that fails fails the call and takes back the others.

        Raises:
            Overloaded: there is no room; nothing was queued, and `settle` is told nothing.
        """
        first_expiry = self._queue.admit(items)
        call = PendingCall(items, settle)
        for item in items:
            self._pending[item.sequence] = Pending(item, call)
        self._wake.set()
        if self._timer is None or first_expiry < self._timer.when():
            self._set_timer()

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

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            EngineLost: no batch can be computed any more; all calls have been told so.
        """
        one_at_a_time = self._in_flight.most == 1  # then a task for each would be for nothing
        try:
            while True:
                if not one_at_a_time:
                    await self._in_flight.room()
                await self._let_arrivals_in()
                self._drop_expired()
                batch = self._queue.take()
                if batch is None:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                self._begin(batch)
                if one_at_a_time:
                    await self._serve(batch)
                else:
                    self._in_flight.start(self._serve(batch))
        finally:
            await self._in_flight.cancel()

    async def _let_arrivals_in(self) -> None:
        """Let calls that have already reached this process join the next batch.

        Not a wait for calls that may come: it gives the event loop its turn for as long as each
        turn brings some. A call takes several turns from its arrival to the queue; without this a
        burst of 64 calls ran as batches of one or two (docs/decisions/0003-small-batches.md).
        """
        before = 0
        while before < self._queue.rows < self._queue.max_batch_rows:
            before = self._queue.rows
            await asyncio.sleep(0)

    def _begin(self, batch: Batch) -> None:
        """Note that the parts run from now on, so that no slot is released under the engine."""
        now = self._clock()
        waits = []
        for part in batch.parts:
            pending = self._pending[part.item.sequence]
            pending.parts_running += 1
            if part.start == 0:
                pending.queue_seconds = now - part.item.enqueued_at
                waits.append(pending.queue_seconds)
        self._metrics.waited(batch.key.layer, waits)

    async def _serve(self, batch: Batch) -> None:
        try:
            result = await self._compute(batch)
        except EngineLost:
            self._end_lost(batch.parts)
            raise
        except Exception as error:
            if len(batch.parts) == 1:
                self._fail_part(batch.parts[0], error)
                return
            text = "batch_failed layer=%s requests=%d rows=%d action=retry_one_by_one"
            name = quoted(batch.key.layer)
            logger.warning(text, name, len(batch.parts), batch.rows, exc_info=error)
            for number, part in enumerate(batch.parts):
                try:
                    await self._serve_alone(part)
                except EngineLost:
                    self._end_lost(batch.parts[number:])
                    raise
        else:
            self._finish(batch, result)

    def _end_lost(self, parts: Sequence[Part]) -> None:
        """Tell every caller that the engine is gone, and let go of the parts that it ran."""
        self.fail_all(
            Unavailable("the server has lost its device and ends; send the call to another one")
        )
        for part in parts:
            self._end_part(part)

    async def _serve_alone(self, part: Part) -> None:
        """Compute one part of a batch that failed, unless nobody can use its result any more."""
        call = self._pending[part.item.sequence].call
        now = self._clock()
        if part.item.deadline is not None and part.item.deadline <= now:
            self._fail(call, too_late(part.item, now))
        if call.is_settled:
            self._end_part(part)
            return
        alone = Batch(part.item.key, (part,), part.rows)
        try:
            result = await self._compute(alone)
        except EngineLost:
            raise
        except Exception as error:
            self._fail_part(part, error)
        else:
            self._finish(alone, result)

    async def _compute(self, batch: Batch) -> BatchResult:
        try:
            result = await self._run_batch(batch)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Something inside was cancelled, this loop was not: that is a failure like any other.
            raise RuntimeError("the computation was cancelled from inside") from error
        if len(result.rows) != len(batch.parts):
            raise RuntimeError(f"{len(result.rows)} results for {len(batch.parts)} parts")
        self._metrics.batch_finished(
            batch.key.layer,
            rows=batch.rows,
            requests=len(batch.parts),
            x_itemsize=batch.key.x_dtype.itemsize,
            y_itemsize=batch.key.output_dtype.itemsize,
            transfers=result.transfers,
            kernel_seconds=result.kernel_nanoseconds / 1e9,
        )
        return result

    def _finish(self, batch: Batch, result: BatchResult) -> None:
        for part, piece in zip(batch.parts, result.rows, strict=True):
            item = part.item
            pending = self._pending[item.sequence]
            pending.pieces[part.start] = piece
            pending.rows_done += part.rows
            if batch.rows > pending.batch_rows:
                pending.batch_rows = batch.rows
            pending.kernel_nanoseconds += result.kernel_nanoseconds
            if pending.rows_done == item.rows:
                self._complete(pending)
            pending.parts_running -= 1
            self._leave_if_unused(pending)

    def _complete(self, pending: Pending) -> None:
        call, outcome = pending.call, pending.outcome()
        if len(call.items) == 1:
            call.answer([outcome])
            return
        call.outcomes[pending.item.sequence] = outcome
        if len(call.outcomes) == len(call.items):
            call.answer([call.outcomes[item.sequence] for item in call.items])

    def _fail_part(self, part: Part, error: Exception) -> None:
        """End the call of a part that was computed alone and failed all the same."""
        incident = uuid.uuid4().hex[:12]
        text, name = "request_failed incident=%s layer=%s rows=%d", quoted(part.item.key.layer)
        logger.error(text, incident, name, part.item.rows, exc_info=error)
        self._fail(self._pending[part.item.sequence].call, EngineFailure(incident))
        self._end_part(part)

    def _fail(self, call: PendingCall, error: RequestError) -> None:
        call.answer(error)
        self.cancel(call.items)

    def _end_part(self, part: Part) -> None:
        pending = self._pending[part.item.sequence]
        pending.parts_running -= 1
        self._leave_if_unused(pending)

    def _leave_if_unused(self, pending: Pending) -> None:
        item = pending.item
        if not pending.parts_running and item not in self._queue:
            del self._pending[item.sequence]
            self._release(item)

    def _drop_expired(self) -> None:
        for dropped in self._queue.expire(self._clock()):
            # Gone already if another item of its call was dropped before it and failed the call.
            pending = self._pending.get(dropped.item.sequence)
            if pending is not None:
                self._fail(pending.call, dropped.error)

    def _set_timer(self) -> None:
        """See to it that what expires is told so in time, however long the engine is busy."""
        expiry = self._queue.next_expiry()
        if expiry is None or (self._timer is not None and self._timer.when() <= expiry):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(expiry, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._drop_expired()
        self._set_timer()
