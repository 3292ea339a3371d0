"""Batches that are with the engine: computed, tried again call by call, settled or failed.

What takes batches from a queue hands them in here; `ledger.py` settles their calls. Event loop
only; knows neither torch nor grpc.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from qlinear_service.errors import (
    ActivationsGone,
    EngineFailure,
    EngineLost,
    Unavailable,
)
from qlinear_service.ledger import Ledger
from qlinear_service.log_values import event
from qlinear_service.metrics import Metrics
from qlinear_service.results import BatchResult
from qlinear_service.tracing import BatchTrace, Tracer
from qlinear_service.watchdog import Watchdog
from qlinear_service.work import Batch, Part

__all__ = ["BatchRuns", "RunBatch", "Together"]

logger = logging.getLogger(__name__)

RunBatch: TypeAlias = Callable[[Batch], Awaitable[BatchResult]]

Finished: TypeAlias = tuple[BatchResult, BatchTrace | None]
"""What came of a batch, and its trace if a call of it is traced."""

T = TypeVar("T")


class Together(Protocol):
    """What computes several layers of the same calls at once."""

    def goes_together(self, batches: Sequence[Batch]) -> bool:
        """Say whether these can be handed to `run_together`."""
        ...

    async def run_together(self, batches: Sequence[Batch]) -> Sequence[BatchResult]:
        """Return the results of each batch.

        Raises:
            EngineLost: nothing can be computed any more.
            Exception: they have failed; their activations are as they were.
        """
        ...


class BatchRuns:
    """Sees batches through, whatever becomes of them.

    Args:
        ledger: knows whose they are.
        run_alone: computes one part of a batch that has failed.
        watchdog: told of each computation.
        clock: seconds, of the items' times.
        metrics: told of each batch.
        tracer: told of batches in which a call is traced.
        together: computes layers of the same calls at once; None: nothing does.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        run_alone: RunBatch,
        watchdog: Watchdog,
        clock: Callable[[], float],
        metrics: Metrics,
        tracer: Tracer | None,
        together: Together | None = None,
    ) -> None:
        self._ledger = ledger
        self._run_alone = run_alone
        self._watchdog = watchdog
        self._clock = clock
        self._metrics = metrics
        self._tracer = tracer
        self._together = together

    async def serve(self, batch: Batch, run: RunBatch) -> None:
        """Compute a batch whose parts run as the ledger knows, and settle its calls.

        Raises:
            EngineLost: no batch can be computed any more; all calls have been told so.
        """
        await self._settle((batch,), self._compute(batch, run))

    def goes_together(self, batches: Sequence[Batch]) -> bool:
        """Say whether these are for `serve_together`, and not one by one for `serve`."""
        together = self._together
        return together is not None and len(batches) > 1 and together.goes_together(batches)

    async def serve_together(self, batches: Sequence[Batch]) -> None:
        """Do what `serve` does for each of some batches that `goes_together`, all at once.

        Raises:
            EngineLost: no batch can be computed any more; all calls have been told so.
        """
        await self._settle(batches, self._compute_together(batches))

    async def _settle(self, batches: Sequence[Batch], work: Awaitable[list[Finished]]) -> None:
        """Settle the calls of what `work` computes; if that fails, part by part."""
        try:
            finished = await work
        except EngineLost:
            self.end_lost(_parts_of(batches))
            raise
        except ActivationsGone as error:
            for part in _parts_of(batches):
                self._fail_part(part, error)
        except Exception as error:
            parts = _parts_of(batches)
            if len(parts) == 1:
                self._fail_part(parts[0], error)
                return
            first, names = batches[0], ", ".join(batch.key.layer for batch in batches)
            values = {"layer": names, "requests": len(first.parts), "rows": first.rows}
            values |= {"action": "retry_one_by_one", "exc_info": error}
            event(logger, logging.WARNING, "batch_failed", **values)
            for number, part in enumerate(parts):
                try:
                    await self._serve_alone(part)
                except EngineLost:
                    self.end_lost(parts[number:])
                    raise
        else:
            for batch, (result, trace) in zip(batches, finished, strict=True):
                self._ledger.finish(batch, result, trace)

    def end_lost(self, parts: Sequence[Part]) -> None:
        """Tell every caller that the engine is gone, and let go of the parts that it ran."""
        self._ledger.fail_all(
            Unavailable("the server has lost its device and ends; send the call to another one")
        )
        for part in parts:
            self._ledger.end_part(part)

    async def _serve_alone(self, part: Part) -> None:
        """Compute one part of a batch that failed, unless nobody can use its result any more."""
        if not self._ledger.is_wanted(part, self._clock()):
            return
        alone = Batch(part.item.key, (part,), part.rows)
        try:
            ((result, trace),) = await self._compute(alone, self._run_alone)
        except EngineLost:
            raise
        except Exception as error:
            self._fail_part(part, error)
        else:
            self._ledger.finish(alone, result, trace)

    async def _compute(self, batch: Batch, run: RunBatch) -> list[Finished]:
        began = self._clock()
        result = await self._watched(run(batch))
        _check(batch, result)
        return [(result, self.finished(batch, result, began))]

    async def _compute_together(self, batches: Sequence[Batch]) -> list[Finished]:
        assert self._together is not None, "something has said that they go together"
        began = self._clock()
        results = await self._watched(self._together.run_together(batches))
        for batch, result in zip(batches, results, strict=True):
            _check(batch, result)
        return [
            (result, self.finished(batch, result, began))
            for batch, result in zip(batches, results, strict=True)
        ]

    async def _watched(self, work: Awaitable[T]) -> T:
        number = self._watchdog.begin()
        try:
            return await work
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Something inside was cancelled, this loop was not: that is a failure like any other.
            raise RuntimeError("the computation was cancelled from inside") from error
        finally:
            self._watchdog.end(number)

    def finished(self, batch: Batch, result: BatchResult, began: float) -> BatchTrace | None:
        """Tell metrics and tracer of a batch; return its trace if a call of it is traced."""
        self._metrics.batch_finished(
            batch.key.layer,
            rows=batch.rows,
            requests=len(batch.parts),
            x_itemsize=batch.key.x_dtype.itemsize,
            y_itemsize=batch.key.output_dtype.itemsize,
            transfers=result.transfers,
            kernel_seconds=result.kernel_nanoseconds / 1e9,
            is_timed=result.is_timed,
            launches=result.launches,
        )
        if self._tracer is None:
            return None
        calls = [part.item.traceparent for part in batch.parts if part.item.traceparent is not None]
        if not calls:
            return None
        nanoseconds = result.kernel_nanoseconds if result.is_timed else 0
        trace = BatchTrace("", began, self._clock(), result.transfers, nanoseconds)
        return self._tracer.batch(batch.key.layer, batch.rows, calls, trace)

    def _fail_part(self, part: Part, error: Exception) -> None:
        """End the call of a part that was computed alone and failed all the same."""
        incident = uuid.uuid4().hex[:12]
        name, rows = part.item.key.layer, part.item.rows
        values = {"incident": incident, "layer": name, "rows": rows}
        event(logger, logging.ERROR, "request_failed", **values, exc_info=error)
        self._ledger.fail_part(part, EngineFailure(incident))


def _check(batch: Batch, result: BatchResult) -> None:
    if len(result.rows) != len(batch.parts):
        raise RuntimeError(f"{len(result.rows)} results for {len(batch.parts)} parts")


def _parts_of(batches: Sequence[Batch]) -> Sequence[Part]:
    return [part for batch in batches for part in batch.parts]
