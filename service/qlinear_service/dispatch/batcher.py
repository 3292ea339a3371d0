"""The batcher of a GPU server: hands calls to the native dispatcher, and settles what it has ended.

Which calls are computed together, and when, is decided and done there; batches that it cannot send
itself come back and are computed here, each a task. Event loop only; knows neither torch nor grpc.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from qlinear_service.batch_runs import BatchRuns, RunBatch, Together
from qlinear_service.batching import Dropped
from qlinear_service.dispatch.abi import Kind
from qlinear_service.dispatch.host import HostEngine
from qlinear_service.dispatch.native import Ended, NativeDispatch
from qlinear_service.dispatch.queue import NativeQueue
from qlinear_service.errors import ActivationsGone, EngineLost, RequestError
from qlinear_service.in_flight import InFlight
from qlinear_service.ledger import Ledger
from qlinear_service.log_values import event
from qlinear_service.metrics import Metrics
from qlinear_service.pending import Settle
from qlinear_service.refusals import too_late, too_old
from qlinear_service.results import BatchResult
from qlinear_service.slots import Slab
from qlinear_service.tracing import Tracer
from qlinear_service.watchdog import Watchdog
from qlinear_service.work import Batch, Part, WorkItem

__all__ = ["DispatchBatcher"]

logger = logging.getLogger(__name__)

MOST_HOSTED = 1 << 20
"""The dispatcher bounds how many batches it leaves to the host."""

LOOKS = 4
"""At batches on the device, in the longest time that one may take."""


class _Group(NamedTuple):
    """A batch that the dispatcher tells of, and those of its items that it has named so far."""

    head: Ended
    items: list[Ended]


class DispatchBatcher:
    """The one owner of the calls that the dispatcher has; call it from the event loop only.

    Args:
        native: the dispatcher.
        queue: its queue.
        engine: computes what it leaves to the host.
        together: does so at once for layers of the same calls, where it can; None: nothing does.
        slab: where results of its own batches lie.
        release: told of each item exactly once, when nothing will touch its slot again.
        clock: seconds, the clock of the items' times and of the dispatcher: the monotonic one.
        metrics: told of each batch.
        max_age_seconds: longest wait, for the words about it.
        most_batch_seconds: after which the engine is taken for lost; 0: never.
        tracer: told of batches in which a call is traced.
    """

    def __init__(
        self,
        *,
        native: NativeDispatch,
        queue: NativeQueue,
        engine: HostEngine,
        slab: Slab,
        release: Callable[[WorkItem], None],
        clock: Callable[[], float],
        metrics: Metrics,
        max_age_seconds: float,
        most_batch_seconds: float = 0.0,
        tracer: Tracer | None = None,
        together: Together | None = None,
    ) -> None:
        self._native, self._queue, self._engine = native, queue, engine
        self._slab, self._clock, self._metrics = slab, clock, metrics
        self._max_age_seconds = max_age_seconds
        self._most_batch_seconds = most_batch_seconds
        self._ledger = Ledger(queue, release)
        self._fault = asyncio.Event()
        self._hosted = InFlight(MOST_HOSTED, on_fault=self._fault.set)
        self._broken: Exception | None = None
        self._watchdog = Watchdog(most_batch_seconds, self._on_wedged)
        self._runs = BatchRuns(
            ledger=self._ledger,
            run_alone=engine.run,
            watchdog=self._watchdog,
            clock=clock,
            metrics=metrics,
            tracer=tracer,
            together=together,
        )
        self._group: _Group | None = None
        self._chain: list[tuple[int, Batch]] = []
        """Numbers and batches for the host, of layers of the same calls that are not all told."""
        self._looking: asyncio.TimerHandle | None = None

    @property
    def items_held(self) -> int:
        """Items that wait or run, those of callers that have left included."""
        return len(self._ledger)

    def check_room(self, rows: int) -> None:
        """Raise Overloaded unless `rows` more may wait."""
        self._queue.check_room(rows)

    def submit(self, items: Sequence[WorkItem], settle: Settle) -> None:
        """Queue the items of one call; `settle` is told their outcomes, in order, or an error.

        Where nothing runs, the call is on its way to the device when this returns.

        Raises:
            Overloaded: there is no room; nothing was queued, and `settle` is told nothing.
        """
        self._queue.check_room(sum(item.rows for item in items))
        self._ledger.enter(items, settle)
        self._queue.admit(items)

    def cancel(self, items: Sequence[WorkItem]) -> None:
        """Forget a call: what has not begun to run never will, and nobody is told of the rest."""
        self._ledger.cancel(items)

    def withdraw(self, items: Sequence[WorkItem]) -> bool:
        """End a call of which nothing has begun to run as `Cancelled`; return whether it was so."""
        return self._ledger.withdraw(items)

    def fail_all(self, error: RequestError) -> None:
        """End every call that has no answer yet with `error`."""
        self._ledger.fail_all(error)

    async def run(self) -> None:
        """Settle what ends until cancelled.

        Raises:
            EngineLost: no batch can be computed any more; all calls have been told so.
        """
        loop = asyncio.get_running_loop()
        loop.add_reader(self._native.done_fd, self._on_ended)
        self._look()
        try:
            await self._fault.wait()
            if self._broken is not None:
                raise self._broken
            await self._hosted.room()  # raises what went wrong
        finally:
            loop.remove_reader(self._native.done_fd)
            if self._looking is not None:
                self._looking.cancel()
            self._watchdog.stop()
            await self._hosted.cancel()

    def _on_ended(self) -> None:
        try:
            for ended in self._native.ended():
                self._take(ended)
        except Exception as error:
            # What was not told of stays unanswered: nothing may go on as if it were right.
            event(logger, logging.CRITICAL, "dispatcher_broken", exc_info=error)
            self._broken = error
            self._runs.end_lost(())
            self._fault.set()

    def _take(self, ended: Ended) -> None:
        """Act on one completion; those of a batch are gathered until it is complete."""
        kind = ended.kind
        if kind in (Kind.ITEM_DONE, Kind.ITEM_PART):
            assert self._group is not None, "items of a batch follow it"
            self._group.items.append(ended)
        elif kind == Kind.ITEM_LEFT:
            self._last_word(ended.sequence)
            return
        elif kind in (Kind.ITEM_LATE, Kind.ITEM_OLD):
            self._drop(ended)
            return
        else:
            self._group = _Group(ended, [])
        group = self._group
        if len(group.items) == group.head.start:
            self._group = None
            if group.head.kind == Kind.BATCH_DONE:
                self._finish(group)
            elif group.head.kind == Kind.BATCH_HOST:
                self._host(group)
            else:
                self._see_to(group)

    def _finish(self, group: _Group) -> None:
        """Settle the calls of a batch that the dispatcher has computed."""
        head, batch = group.head, self._begun(group)
        view, size = self._slab.view, self._queue.result_bytes
        rows = [view(part.item.slot)[: size(part.item)] for part in batch.parts]
        kernel_nanoseconds = self._engine.kernel_nanoseconds(head.kernel_nanoseconds)
        result = BatchResult(rows, kernel_nanoseconds, head.copies(), True, is_timed=head.is_timed)
        trace = self._runs.finished(batch, result, head.seconds)
        for part in batch.parts:
            self._queue.left(part.item.sequence)
        self._ledger.finish(batch, result, trace)

    def _host(self, group: _Group) -> None:
        """Compute a batch that is left to the host, with those that are told to go with it."""
        batch = self._begun(group)
        self._engine.learn(batch)
        self._chain.append((group.head.batch, batch))
        if not group.head.is_last:
            return
        (numbers, batches), self._chain = zip(*self._chain, strict=True), []
        run = self._engine.run
        if self._runs.goes_together(batches):
            for number in numbers[1:]:
                self._native.host_joins(number)
            self._hosted.start(self._serve(numbers, self._runs.serve_together(batches)))
            return
        for number, each in zip(numbers, batches, strict=True):
            self._hosted.start(self._serve((number,), self._runs.serve(each, run)))

    def _see_to(self, group: _Group) -> None:
        """Try the calls of a batch of the dispatcher that has failed one by one."""
        batch, run = self._begun(group), self._failed(group.head)
        self._hosted.start(self._serve((group.head.batch,), self._runs.serve(batch, run)))

    async def _serve(self, numbers: Sequence[int], work: Awaitable[None]) -> None:
        await work
        # Not after an error or a cancellation: then a device that nobody understands may still
        # touch what the batches name, and the process ends.
        for number in numbers:
            self._native.host_done(number)

    def _failed(self, head: Ended) -> RunBatch:
        """Return what fails as the dispatcher's batch did, once the device is fit for more."""
        text = f"a batch of {head.rows} rows: {self._native.error_text()} (status {head.status})"
        error: Exception = RuntimeError(text)
        if head.kind == Kind.BATCH_GONE:
            error = ActivationsGone(f"results may lie where activations did: {text}")

        async def fail(batch: Batch) -> BatchResult:
            await self._engine.recover(error)
            raise error

        return fail

    def _begun(self, group: _Group) -> Batch:
        """Return the batch of a group; from its beginning on its parts run."""
        parts = []
        for ended in group.items:
            item = self._ledger.item(ended.sequence)
            if group.head.kind == Kind.BATCH_DONE:
                parts.append(Part(item, 0, item.rows))
            else:
                parts.append(Part(item, ended.start, ended.rows))
        batch = Batch(parts[0].item.key, tuple(parts), group.head.rows)
        waits = self._ledger.begin(batch, group.head.seconds)
        self._metrics.waited(batch.key.layer, waits)
        return batch

    def _drop(self, ended: Ended) -> None:
        """End the call of an item that came to its end in the queue."""
        item, now = self._ledger.item(ended.sequence), self._clock()
        if ended.is_last:
            self._queue.left(ended.sequence)
        error = (
            too_late(item, now)
            if ended.kind == Kind.ITEM_LATE
            else too_old(item, now, self._max_age_seconds)
        )
        self._queue.drop(Dropped(item, error))
        self._ledger.drop_expired(now)

    def _last_word(self, sequence: int) -> None:
        item = self._ledger.item(sequence)
        self._queue.left(sequence)
        self._ledger.look_at(item)

    def _look(self) -> None:
        """See from time to time whether a batch on the device does not end."""
        most = self._most_batch_seconds
        if not most:
            return
        began = self._native.oldest()
        if began and self._clock() - began > most:
            self._on_wedged(self._clock() - began)
            return
        self._looking = asyncio.get_running_loop().call_later(most / LOOKS, self._look)

    def _on_wedged(self, seconds: float) -> None:
        """End as with a lost engine: no slot of a batch that may still run is released."""
        self._broken = EngineLost(f"a batch has run for {seconds:.1f} s and does not end")
        event(logger, logging.CRITICAL, "engine_wedged", seconds=seconds)
        self._runs.end_lost(())
        self._fault.set()
