"""The engine on the CPU: gathers a batch's rows from their slots, multiplies, splits the result.

It is handed batches and returns bytes; it sees no caller and no message. What runs batches on a GPU
is gpu/engine.py, behind the same `BatchRunner`.
"""

import asyncio
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from qlinear_service.batching import Batch, Part
from qlinear_service.config import size_class
from qlinear_service.kernels.backends import Kernels
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerRegistry
from qlinear_service.results import BatchResult
from qlinear_service.roofline import Roofline
from qlinear_service.slots import Slab

__all__ = [
    "QUICK_SECONDS",
    "BatchRunner",
    "CpuRunner",
    "Engine",
    "WorkerThread",
    "gather_rows",
    "part_rows",
    "split_rows",
]

QUICK_SECONDS = 100e-6
"""Two wake-ups of threads and the fight for the interpreter lock cost some 40 us of processor time,
and health checks can wait this long (docs/decisions/0003-small-batches.md)."""

T = TypeVar("T")


class BatchRunner(Protocol):
    """What computes batches, as the event loop sees it."""

    @property
    def most_in_flight(self) -> int:
        """Batches that may be handed to `run` at a time."""

    @property
    def most_chained(self) -> int:
        """Batches beyond that, for more layers of the same calls."""

    async def run(self, batch: Batch) -> BatchResult:
        """Return the result rows of each part; on the event loop, without blocking it for long.

        Raises:
            EngineLost: nothing can be computed any more.
            Exception: this batch has failed; another may succeed.
        """
        ...

    def is_lone(self, batch: Batch) -> bool:
        """Say whether `batch` is so quick that nothing needs to go on beside it."""
        ...

    async def run_lone(self, batch: Batch) -> BatchResult:
        """Do what `run` does, faster, for a batch that `is_lone`, with no other beside it."""
        ...

    def stop(self, timeout_seconds: float) -> bool:
        """End its threads; return whether they have ended in time."""
        ...


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
        if not layer.spec.quantized:
            return False  # torch takes longer than the floor of the kernels
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
        flat = y.contiguous().view(torch.uint8).numpy().data.cast("B")
        copies = (("gather", started - taken),)
        return BatchResult(split_rows(flat, batch), kernel_nanoseconds, copies)

    def _gather(self, batch: Batch, k: int) -> torch.Tensor:
        """Return x [M, k]: a view of the one slot, or the stage with all rows copied into it."""
        row_bytes = k * batch.key.x_dtype.itemsize
        if len(batch.parts) == 1:
            rows = part_rows(self._slab, batch.parts[0], row_bytes)
        else:
            nbytes = batch.rows * row_bytes
            if len(self._stage) < nbytes:
                self._stage = bytearray(size_class(nbytes))
            rows = memoryview(self._stage)[:nbytes]
            gather_rows(self._slab, batch, row_bytes, rows)
        return torch.frombuffer(rows, dtype=to_torch(batch.key.x_dtype)).view(batch.rows, k)


def part_rows(slab: Slab, part: Part, row_bytes: int) -> memoryview:
    """Return the bytes of one part's rows, where they lie."""
    first = part.start * row_bytes
    return slab.view(part.item.slot)[first : first + part.rows * row_bytes]


def gather_rows(slab: Slab, batch: Batch, row_bytes: int, into: memoryview) -> None:
    """Copy the rows of all parts into `into`, one after the other."""
    end = 0
    for part in batch.parts:
        start, end = end, end + part.rows * row_bytes
        into[start:end] = part_rows(slab, part, row_bytes)


def split_rows(flat: memoryview, batch: Batch) -> list[memoryview]:
    """Return the bytes of each part's rows of y [M, n], as views."""
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


class CpuRunner:
    """Runs one batch at a time: on the event loop if it is quick, else on the engine's thread.

    Args:
        engine: computes.
        worker: the thread; whoever made it stops it.
    """

    most_in_flight = 1
    most_chained = 0

    def __init__(self, engine: Engine, worker: WorkerThread) -> None:
        self._engine = engine
        self._worker = worker

    async def run(self, batch: Batch) -> BatchResult:
        """Return the result rows of each part."""
        if self._engine.is_quick(batch):
            return self._engine.run(batch)
        return await self._worker.run(self._engine.run, batch)

    def is_lone(self, batch: Batch) -> bool:
        """Return False: batches run one at a time in any case."""
        return False

    async def run_lone(self, batch: Batch) -> BatchResult:
        """Do what `run` does."""
        return await self.run(batch)

    def stop(self, timeout_seconds: float) -> bool:
        """Do nothing: there is no thread of its own."""
        return True


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_error(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
