"""Drives the queue: runs a batch the moment the engine has room, and sees to what goes wrong.

Everything here happens on the event loop; the computation is behind `run_batch`, which is handed
in. `ledger.py` settles the calls. Knows neither torch nor grpc.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from qlinear_service.batch_runs import BatchRuns, RunBatch, Together
from qlinear_service.batching import Batch, WorkItem, WorkQueue
from qlinear_service.errors import EngineLost, RequestError
from qlinear_service.in_flight import InFlight
from qlinear_service.ledger import Ledger
from qlinear_service.log_values import event
from qlinear_service.metrics import Metrics
from qlinear_service.pending import Settle
from qlinear_service.tracing import Tracer
from qlinear_service.watchdog import Watchdog

__all__ = ["Batcher", "RunBatch"]

logger = logging.getLogger(__name__)


class Batcher:
    """The one owner of the queue; call it from the event loop's thread only.

    Args:
        queue: what waits.
        run_batch: computes a batch; may fail in any way.
        run_lone: does so faster for one that `is_lone` agrees to, without anything beside it.
        is_lone: says whether a batch is so quick that nothing needs to go on beside it.
        most_chained: batches that may be with the engine beyond `most_running`, for more layers of
            the same calls.
        together: computes such layers at once, where it can; None: nothing does.
        release: told of each item exactly once, when neither queue nor engine will touch its
            slot again. That may be later than its caller's end.
        clock: seconds, the clock of the items' times and of the loop's timers.
        metrics: told of each batch.
        most_running: batches that may be with the engine at a time.
        most_batch_seconds: after which the engine is taken for lost; 0: never.
        tracer: told of batches in which a call is traced.
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
        most_batch_seconds: float = 0.0,
        run_lone: RunBatch | None = None,
        is_lone: Callable[[Batch], bool] = lambda batch: False,
        most_chained: int = 0,
        together: Together | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._queue = queue
        self._run_batch = run_batch
        self._run_lone = run_lone or run_batch
        self._is_lone = is_lone
        self._most_chained = most_chained
        self._clock = clock
        self._metrics = metrics
        self._ledger = Ledger(queue, release)
        self._wake = asyncio.Event()
        self._in_flight = InFlight(most_running, on_fault=self._wake.set)
        self._timer: asyncio.TimerHandle | None = None
        self._watchdog = Watchdog(most_batch_seconds, self._on_wedged)
        self._runs = BatchRuns(
            ledger=self._ledger,
            run_alone=lambda batch: self._run_batch(batch),
            watchdog=self._watchdog,
            clock=clock,
            metrics=metrics,
            tracer=tracer,
            together=together,
        )
        self._task: asyncio.Task[None] | None = None
        self._wedged: EngineLost | None = None

    @property
    def items_held(self) -> int:
        """Items that wait or run, those of callers that have left included."""
        return len(self._ledger)

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
        self._ledger.enter(items, settle)
        self._wake.set()
        if self._timer is None or first_expiry < self._timer.when():
            self._set_timer()

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
        """Serve until cancelled.

        Raises:
            EngineLost: no batch can be computed any more; all calls have been told so.
        """
        self._task = asyncio.current_task()
        one_at_a_time = self._in_flight.most == 1  # then a task for each would be for nothing
        try:
            while True:
                if not one_at_a_time:
                    await self._in_flight.room()
                await self._let_arrivals_in()
                self._ledger.drop_expired(self._clock())
                batch = self._queue.take(self._clock())
                if batch is None:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                waits = self._ledger.begin(batch, self._clock())
                self._metrics.waited(batch.key.layer, waits)
                if one_at_a_time:
                    await self._runs.serve(batch, self._run_batch)
                elif not (self._queue.rows or len(self._in_flight)) and self._is_lone(batch):
                    await self._runs.serve(batch, self._run_lone)
                else:
                    self._start([batch, *self._followers(batch)])
        except asyncio.CancelledError:
            if self._wedged is None:
                raise
            raise self._wedged from None
        finally:
            self._watchdog.stop()
            await self._in_flight.cancel()

    def _followers(self, batch: Batch) -> Iterator[Batch]:
        """Take other layers of the same calls, which go with a batch without a wait for room.

        So the layers of a call are one chain of launches, and not a matter of several turns.
        """
        for items in self._ledger.followers(batch)[: self._most_chained]:
            follower = self._queue.take_together(items)
            if follower is None:
                return
            waits = self._ledger.begin(follower, self._clock())
            self._metrics.waited(follower.key.layer, waits)
            yield follower

    def _start(self, chain: Sequence[Batch]) -> None:
        """Send a batch and its followers: at once, or right behind each other."""
        if self._runs.goes_together(chain):
            self._in_flight.start(self._runs.serve_together(chain))
            return
        for batch in chain:
            self._in_flight.start(self._runs.serve(batch, self._run_batch))

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
        # And a wait for calls that may come, where that is asked for and nothing runs. In turns of
        # the loop, as its timers are a millisecond coarse.
        while not len(self._in_flight) and self._queue.wait_end(now := self._clock()) > now:
            await asyncio.sleep(0)

    def _on_wedged(self, seconds: float) -> None:
        """End as with a lost engine: no slot of a batch that may still run is released."""
        self._wedged = EngineLost(f"a batch has run for {seconds:.1f} s and does not end")
        event(logger, logging.CRITICAL, "engine_wedged", seconds=seconds)
        self._runs.end_lost(())
        assert self._task is not None, "what runs batches runs"
        self._task.cancel()

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
        self._ledger.drop_expired(self._clock())
        self._set_timer()
