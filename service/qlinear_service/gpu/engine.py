"""The engine on a GPU: several batches in flight, one copied in, one computed, one copied out.

A batch passes through: rows from slots into pinned memory, copy to the device, product, copy back,
rows out of pinned memory. Nothing here waits for the GPU but one thread, which waits for the oldest
batch; small batches are put on their way from the event loop itself, large ones from another
thread. Sees no caller and no message.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from typing import Any

import torch

from qlinear_service.batching import Batch
from qlinear_service.engine import gather_rows, part_rows, split_rows
from qlinear_service.errors import EngineLost
from qlinear_service.gpu.stages import Stage, StagePool
from qlinear_service.gpu.streams import Device
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerRegistry, QuantizedLinear
from qlinear_service.log_values import event
from qlinear_service.results import BatchResult
from qlinear_service.slots import Slab

__all__ = ["STAGES", "GpuEngine"]

logger = logging.getLogger(__name__)

STAGES = 2
"""Batches in flight unless told otherwise: one computes while the other is copied, gathered and
settled, which take as long as a kernel or longer (docs/decisions/0005-gpu-stages.md)."""

QUICK_BYTES = 128 * 1024
"""Rows of so many bytes are gathered in some 6 microseconds, less than waking a thread takes."""

LARGE_COPY_BYTES = 64 * 1024
"""From here on copies are torch's, which lets go of the interpreter lock and costs some
microseconds more than one of Python's own."""


class _Job:
    """One batch on its way, and the future of whoever waits for it."""

    __slots__ = ("batch", "error", "future", "gather_nanoseconds", "layer", "loop", "stage")

    def __init__(
        self, batch: Batch, layer: QuantizedLinear, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.batch = batch
        self.layer = layer
        self.loop = loop
        self.future: asyncio.Future[BatchResult] = loop.create_future()
        self.stage: Stage | None = None
        self.error: BaseException | None = None
        """Why it could not be launched, or not all of it."""
        self.gather_nanoseconds = 0

    @property
    def x_row_bytes(self) -> int:
        return self.layer.spec.k * self.batch.key.x_dtype.itemsize

    @property
    def x_bytes(self) -> int:
        return self.batch.rows * self.x_row_bytes

    @property
    def y_bytes(self) -> int:
        return self.batch.rows * self.layer.spec.n * self.batch.key.output_dtype.itemsize

    def settle(self, outcome: BatchResult | BaseException) -> None:
        """Tell whoever waits, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
            self.loop.call_soon_threadsafe(functools.partial(_set, self.future, outcome))


class GpuEngine:
    """Runs batches on one device.

    Args:
        device: where; all layers are there.
        registry: the loaded layers.
        slab: where activations lie.
        stages: batches that may be in flight.

    Raises:
        RuntimeError: the device has no room for the buffers.
    """

    def __init__(
        self, *, device: Device, registry: LayerRegistry, slab: Slab, stages: int = STAGES
    ) -> None:
        self._device = device
        self._registry = registry
        self._slab = slab
        self.most_in_flight = stages
        self._stages = StagePool(device, stages)
        self._lost: EngineLost | None = None
        self._launching = threading.Lock()
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, args=(jobs,), name=name, daemon=True)
            for name, work, jobs in (
                ("gpu launches", self._work, self._waiting),
                ("gpu results", self._work, self._launched),
            )
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, batch: Batch) -> BatchResult:
        """Return the result rows of each part.

        Raises:
            EngineLost: the device is gone.
            Exception: this batch has failed.
        """
        if self._lost is not None:
            raise EngineLost(str(self._lost))
        layer = self._registry.resolve(batch.key.layer)
        job = _Job(batch, layer, asyncio.get_running_loop())
        if job.x_bytes <= QUICK_BYTES:
            job.stage = self._stages.take_ready(job.x_bytes, job.y_bytes)
        if job.stage is not None:
            self._launch(job)
        else:
            self._waiting.put(job)
        return await job.future

    def stop(self, timeout_seconds: float) -> bool:
        """End both threads after what is on its way; return whether they have ended in time."""
        deadline = time.monotonic() + timeout_seconds
        for jobs, thread in zip((self._waiting, self._launched), self._threads, strict=True):
            jobs.put(None)
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, jobs: "queue.SimpleQueue[_Job | None]") -> None:
        step = self._launch if jobs is self._waiting else self._complete
        while (job := jobs.get()) is not None:
            step(job)

    def _launch(self, job: _Job) -> None:
        """Put a batch on its way, without waiting for any of it, nor for what went wrong."""
        try:
            if job.stage is None:
                job.stage = self._stages.take(job.x_bytes, job.y_bytes)
            self._enqueue(job, job.stage)
        except BaseException as error:
            job.error = error
        self._launched.put(job)

    def _enqueue(self, job: _Job, stage: Stage) -> None:
        batch, spec = job.batch, job.layer.spec
        x_bytes, y_bytes = job.x_bytes, job.y_bytes
        started = time.perf_counter_ns()
        self._gather(job, stage.x.host[:x_bytes])
        job.gather_nanoseconds = time.perf_counter_ns() - started
        x, y = stage.x.device[:x_bytes], stage.y.device[:y_bytes]
        y_dtype = batch.key.output_dtype
        x_rows = x.view(to_torch(batch.key.x_dtype)).view(batch.rows, spec.k)
        y_rows = y.view(to_torch(y_dtype)).view(batch.rows, spec.n)
        # One batch after the other, or events of one would measure kernels of both.
        with self._launching:
            self._device.copy_in(stage.x.host[:x_bytes], x, stage.marks)
            self._device.multiply(job.layer, x_rows, y_rows, y_dtype, stage.marks)
            self._device.copy_out(y, stage.y.host[:y_bytes], stage.marks)

    def _gather(self, job: _Job, into: torch.Tensor) -> None:
        """Copy the rows of all parts into `into`."""
        parts = job.batch.parts
        if len(parts) == 1 and job.x_bytes >= LARGE_COPY_BYTES:
            rows = part_rows(self._slab, parts[0], job.x_row_bytes)
            into.copy_(torch.frombuffer(rows, dtype=torch.uint8))
        else:
            gather_rows(self._slab, job.batch, job.x_row_bytes, into.numpy().data.cast("B"))

    def _complete(self, job: _Job) -> None:
        """Wait for a batch, copy its results out of the stage, and give that back."""
        stage = job.stage
        if stage is None or job.error is not None:
            self._fail(job, job.error or RuntimeError("a batch without a stage"))
            return
        try:
            self._device.wait(stage.marks)
            times = self._device.times(stage.marks)
            started = time.perf_counter_ns()
            flat = _copied(stage.y.host[: job.y_bytes])
            copies = (
                ("gather", job.gather_nanoseconds),
                ("to_device", times.to_device),
                ("from_device", times.from_device),
                ("scatter", time.perf_counter_ns() - started),
            )
            result = BatchResult(split_rows(flat, job.batch), times.kernel, copies)
        except BaseException as error:
            self._fail(job, error)
        else:
            self._stages.give_back(stage)
            job.settle(result)

    def _fail(self, job: _Job, error: BaseException) -> None:
        """Tell of an error once nothing touches the memory of the batch any more."""
        told = error
        try:
            told = self._device.explained(error)
            if job.stage is not None:
                self._device.settle()
        except BaseException as later:
            told = told if isinstance(told, EngineLost) else later
        if isinstance(told, EngineLost) and self._lost is None:
            self._lost = told
            event(logger, logging.CRITICAL, "device_lost", error=told)
        if job.stage is not None:
            self._stages.give_back(job.stage)
        job.settle(told)


def _copied(rows: torch.Tensor) -> memoryview:
    """Return a copy of host memory, so that slow readers hold up no stage."""
    if len(rows) < LARGE_COPY_BYTES:
        return memoryview(rows.numpy().tobytes())
    copy = torch.empty(len(rows), dtype=torch.uint8).copy_(rows)
    return copy.numpy().data.cast("B")


def _set(future: "asyncio.Future[BatchResult]", outcome: Any) -> None:
    if future.done():
        return  # whoever waited has left
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
