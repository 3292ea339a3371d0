"""The engine: gathers a batch's rows from their slots, multiplies, and splits the result.

It lives on one thread, which owns the device. It is handed batches and returns bytes; it sees no
caller, no future and no message.
"""

import asyncio
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from qlinear_service.batching import Batch, Part
from qlinear_service.config import size_class
from qlinear_service.kernels.backends import Kernels
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerRegistry
from qlinear_service.results import BatchResult
from qlinear_service.roofline import Roofline
from qlinear_service.slots import Slab

__all__ = ["Engine", "WorkerThread"]

QUICK_SECONDS = 100e-6
"""Two wake-ups of threads and the fight for the interpreter lock cost some 40 us of processor time,
and health checks can wait this long (docs/decisions/0003-small-batches.md)."""

T = TypeVar("T")


class Engine:
    """Computes one batch at a time.

    Args:
        kernels: what multiplies.
        registry: the loaded layers.
        slab: where activations lie.
        roofline: what the kernels were measured to need at least; None if that says nothing of
            what they take, as for a path that dequantizes a layer at each call.
    """

    def __init__(
        self,
        *,
        kernels: Kernels,
        registry: LayerRegistry,
        slab: Slab,
        roofline: Roofline | None = None,
    ) -> None:
        self._kernels = kernels
        self._registry = registry
        self._slab = slab
        self._roofline = roofline
        self._stage = bytearray()

    def is_quick(self, batch: Batch) -> bool:
        """Say whether `batch` takes no longer than handing it to another thread and back."""
        if self._roofline is None:
            return False
        layer = self._registry.resolve(batch.key.layer)
        products = batch.rows * layer.spec.n * layer.spec.k
        return self._roofline.floor_seconds(layer.streamed_bytes, products) <= QUICK_SECONDS

    def run(self, batch: Batch) -> BatchResult:
        """Return the result rows of each part; blocks while it computes."""
        layer = self._registry.resolve(batch.key.layer)
        taken = time.perf_counter_ns()
        x = self._gather(batch, layer.spec.k)
        started = time.perf_counter_ns()
        y = self._kernels.linear(layer, x, batch.key.output_dtype)
        kernel_nanoseconds = time.perf_counter_ns() - started
        expected = (batch.rows, layer.spec.n)
        if tuple(y.shape) != expected or y.dtype != to_torch(batch.key.output_dtype):
            raise RuntimeError(
                f"kernels {self._kernels.name!r} returned {y.dtype} {list(y.shape)} for layer "
                f"{batch.key.layer!r}; expected {to_torch(batch.key.output_dtype)} {list(expected)}"
            )
        return BatchResult(_split(y, batch), kernel_nanoseconds, started - taken)

    def _gather(self, batch: Batch, k: int) -> torch.Tensor:
        """Return x [M, k]: a view of the one slot, or the stage with all rows copied into it."""
        row_bytes = k * batch.key.x_dtype.itemsize
        if len(batch.parts) == 1:
            rows = self._rows_of(batch.parts[0], row_bytes)
        else:
            rows = self._staged(batch, row_bytes)
        return torch.frombuffer(rows, dtype=to_torch(batch.key.x_dtype)).view(batch.rows, k)

    def _rows_of(self, part: Part, row_bytes: int) -> memoryview:
        first = part.start * row_bytes
        return self._slab.view(part.item.slot)[first : first + part.rows * row_bytes]

    def _staged(self, batch: Batch, row_bytes: int) -> memoryview:
        nbytes = batch.rows * row_bytes
        if len(self._stage) < nbytes:
            self._stage = bytearray(size_class(nbytes))
        stage = memoryview(self._stage)
        end = 0
        for part in batch.parts:
            start, end = end, end + part.rows * row_bytes
            stage[start:end] = self._rows_of(part, row_bytes)
        return stage[:nbytes]


def _split(y: torch.Tensor, batch: Batch) -> list[memoryview]:
    """Return the bytes of each part's rows of y [M, n], as views."""
    flat = y.contiguous().view(torch.uint8).numpy().data.cast("B")
    row_bytes = flat.nbytes // batch.rows
    views = []
    end = 0
    for part in batch.parts:
        start, end = end, end + part.rows * row_bytes
        views.append(flat[start:end])
    return views


class WorkerThread:
    """One thread that runs functions one after the other, for a caller on an event loop.

    A daemon: a computation that does not end cannot keep the process from leaving.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)` as computed on the thread, or raise what it raised.

        Cancelling the waiting does not stop the function.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                settle = functools.partial(_set_result, future, function(*args))
            except BaseException as error:
                settle = functools.partial(_set_error, future, error)
            # The loop may have closed by now: then nobody waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle)

        self._jobs.put(job)
        return await future

    def stop(self, timeout_seconds: float) -> bool:
        """Let the thread end after what is queued; return whether it ended in time."""
        self._jobs.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_error(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
