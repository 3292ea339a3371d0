"""Batches that are with the engine: computed, tried again call by call, settled or failed.

What takes batches from a queue hands them in here; `ledger.py` settles their calls. Event loop
only; knows neither torch nor grpc.
"""

import asyncio
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
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
        try:
            result = await self._compute(batch, run)
        except EngineLost:
            self.end_lost(batch.parts)
            raise
        except ActivationsGone as error:
            for part in batch.parts:
                self._fail_part(part, error)
        except Exception as error:
            if len(batch.parts) == 1:
                self._fail_part(batch.parts[0], error)
                return
            values = {"layer": batch.key.layer, "requests": len(batch.parts), "rows": batch.rows}
            values |= {"action": "retry_one_by_one", "exc_info": error}
            event(logger, logging.WARNING, "batch_failed", **values)
            for number, part in enumerate(batch.parts):
                try:
                    await self._serve_alone(part)
                except EngineLost:
                    self.end_lost(batch.parts[number:])
                    raise
        else:
            self._ledger.finish(batch, *result)

    def goes_together(self, batches: Sequence[Batch]) -> bool:
        """Say whether these are for `serve_together`, and not one by one for `serve`."""
        together = self._together
        return together is not None and len(batches) > 1 and together.goes_together(batches)

    async def serve_together(self, batches: Sequence[Batch], run: RunBatch) -> None:
        """Do what `serve` does for each of some batches that `goes_together`, all at once.

        If that fails they are computed by `run`, one after the other: what fails alone fails alone.

        Raises:
            EngineLost: no batch can be computed any more; all calls have been told so.
        """
        try:
            results = await self._compute_together(batches)
        except EngineLost:
            self.end_lost(_parts_of(batches))
            raise
        except Exception as error:
            names = ", ".join(batch.key.layer for batch in batches)
            values = {"layers": names, "requests": len(batches[0].parts), "rows": batches[0].rows}
            values |= {"action": "retry_layer_by_layer", "exc_info": error}
            event(logger, logging.WARNING, "batches_failed", **values)
            for number, batch in enumerate(batches, start=1):
                try:
                    await self.serve(batch, run)
                except EngineLost:
                    self.end_lost(_parts_of(batches[number:]))
                    raise
        else:
            for batch, result in zip(batches, results, strict=True):
                self._ledger.finish(batch, *result)

    def end_lost(self, parts: Iterable[Part]) -> None:
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
            result = await self._compute(alone, self._run_alone)
        except EngineLost:
            raise
        except Exception as error:
            self._fail_part(part, error)
        else:
            self._ledger.finish(alone, *result)

    async def _compute(self, batch: Batch, run: RunBatch) -> tuple[BatchResult, BatchTrace | None]:
        began = self._clock()
        result = await self._watched(run(batch))
        _check(batch, result)
        return result, self.finished(batch, result, began)

    async def _compute_together(
        self, batches: Sequence[Batch]
    ) -> list[tuple[BatchResult, BatchTrace | None]]:
        assert self._together is not None, "something has said that they go together"
        began = self._clock()
        results = await self._watched(self._together.run_together(batches))
        if len(results) != len(batches):
            raise RuntimeError(f"results of {len(results)} batches for {len(batches)}")
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
            kernel_seconds=result.kernel_nanoseconds / 1e9 if result.is_timed else None,
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


def _parts_of(batches: Iterable[Batch]) -> Iterable[Part]:
    return itertools.chain.from_iterable(batch.parts for batch in batches)
