"""The engine on a GPU: several batches in flight, one copied in, one computed, one copied out.

A batch passes through: rows in, product, rows out; ways.py says how rows travel. One thread waits
for the oldest batch; small batches are put on their way from the event loop itself, large ones from
another thread. A batch that is quick and has the device to itself is waited for on the event loop.
Sees no caller and no message.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Sequence

from qlinear_service.batching import Batch
from qlinear_service.engine import QUICK_SECONDS, split_rows
from qlinear_service.errors import ActivationsGone, EngineLost
from qlinear_service.gpu.admission import admitted
from qlinear_service.gpu.express import Trip
from qlinear_service.gpu.job import Job
from qlinear_service.gpu.stages import Stage, StagePool, copied
from qlinear_service.gpu.streams import Device
from qlinear_service.gpu.together import TOGETHER, Companions, shared_out, split
from qlinear_service.gpu.ways import AUTO, PINNED, Batched, Way, way_of
from qlinear_service.layers import LayerRegistry
from qlinear_service.log_values import event
from qlinear_service.results import BatchResult
from qlinear_service.roofline import Roofline
from qlinear_service.slots import Slab

__all__ = ["STAGES", "GpuEngine"]

logger = logging.getLogger(__name__)

STAGES = 2
"""Batches in flight unless told otherwise: one computes while the other is copied, gathered and
settled, which take as long as a kernel or longer (docs/decisions/0005-gpu-stages.md)."""

CHAINED = 3
"""Stages beyond that for more layers of the same calls: query, key, value; gate and up."""

QUICK_BYTES = 128 * 1024
"""Rows of so many bytes are gathered in some 6 microseconds, less than waking a thread takes."""

LONE_Y_BYTES = 256 * 1024
"""Results that cross the bus in 10 microseconds."""

LONE_SECONDS = 300e-6
"""A lone batch that takes longer than it should is left to the thread that waits for others."""


class GpuEngine:
    """Runs batches on one device.

    Args:
        device: where; all layers are there.
        registry: the loaded layers.
        slab: where activations lie.
        stages: batches that may be in flight.
        chained: batches beyond that, for more layers of the same calls.
        mode: how rows may travel, see ways.py.
        roofline: what the device was measured to need; None: no batch is taken to be quick.

    Raises:
        RuntimeError: the device has no room for the buffers.
    """

    def __init__(
        self,
        *,
        device: Device,
        registry: LayerRegistry,
        slab: Slab,
        stages: int = STAGES,
        chained: int = CHAINED,
        mode: str = AUTO,
        roofline: Roofline | None = None,
    ) -> None:
        self._device = device
        self._registry = registry
        self._slab = slab
        self._mode = mode
        self._roofline = roofline
        self.most_in_flight, self.most_chained = stages, chained
        self.stage_count = stages + chained
        self._stages = StagePool(device.new_stage, self.stage_count)
        self.sees_slab = self._sees_slab = mode != PINNED and admitted(device, slab)
        chains = device.chains and self.sees_slab
        self._companions = Companions(registry, device.can_gather) if chains else None
        self._lost: EngineLost | None = None
        self._launching = threading.Lock()
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, args=(jobs,), name=name, daemon=True)
            for name, work, jobs in (
                ("gpu launches", self._work, self._waiting),
                ("gpu results", self._work, self._launched),
            )
        ]
        for thread in self._threads:
            thread.start()

    def keep(self, stages: int) -> None:
        """Have only so many batches in flight, for who has not begun to compute.

        Args:
            stages: at most as many as there are; buffers beyond them are let go of.
        """
        self._stages.drop(self.most_in_flight - stages)
        self.stage_count -= self.most_in_flight - stages
        self.most_in_flight = stages

    async def run(self, batch: Batch) -> BatchResult:
        """Return the result rows of each part.

        Raises:
            EngineLost: the device is gone.
            Exception: this batch has failed.
        """
        return (await self._send(self._job((batch,))))[0]

    def goes_together(self, batches: Sequence[Batch]) -> bool:
        """Say whether batches of layers of the same calls can be handed to `run_together`."""
        return self._companions is not None and self._companions.may(batches)

    async def run_together(self, batches: Sequence[Batch]) -> list[BatchResult]:
        """Return what `run` does of each batch, if they `goes_together`: all on one way.

        Results never lie in slots, and after an error all activations are as they were.

        Raises:
            EngineLost: the device is gone.
            Exception: one of them has failed, or all.
        """
        return await self._send(self._job(batches))

    def is_lone(self, batch: Batch) -> bool:
        """Say whether `batch` has the device to itself and ends before a thread could be woken."""
        if self._roofline is None or self._stages.free != self.stage_count:
            return False
        layer = self._registry.resolve(batch.key.layer)
        spec, key = layer.spec, batch.key
        if (
            not spec.quantized
            or batch.rows * spec.k * key.x_dtype.itemsize > QUICK_BYTES
            or batch.rows * spec.n * key.output_dtype.itemsize > LONE_Y_BYTES
        ):
            return False
        products = batch.rows * spec.n * spec.k
        return self._roofline.floor_seconds(layer.streamed_bytes, products) <= QUICK_SECONDS

    async def run_lone(self, batch: Batch) -> BatchResult:
        """Do what `run` does for a batch that `is_lone`: without a thread, if it ends in time."""
        job = self._job((batch,))
        job.stage = self._stages.take_ready(job.x_room_bytes, job.y_bytes)
        if job.stage is None:
            return (await self._send(job))[0]
        try:
            self._enqueue(job, job.stage, alone=True)
            if self._device.wait(job.stage.marks, LONE_SECONDS):
                return self._results(job, job.stage)[0]
        except BaseException as error:
            job.error = error
        self._launched.put(job)
        return (await job.future)[0]

    def stop(self, timeout_seconds: float) -> bool:
        """End both threads after what is on its way; return whether they have ended in time."""
        deadline = time.monotonic() + timeout_seconds
        for jobs, thread in zip((self._waiting, self._launched), self._threads, strict=True):
            jobs.put(None)
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        # A lost device has let go of it, and asking one can hang.
        if self._sees_slab and self._lost is None:
            self._sees_slab = False
            self._device.dismiss(self._slab.address)
        return True

    def _job(self, batches: Sequence[Batch]) -> Job:
        """Return what is to go as one."""
        if self._lost is not None:
            raise EngineLost(str(self._lost))
        resolve, (first, *others) = self._registry.resolve, batches
        more = [(other, resolve(other.key.layer)) for other in others]
        return Job(first, resolve(first.key.layer), asyncio.get_running_loop(), more)

    async def _send(self, job: Job) -> list[BatchResult]:
        if job.x_bytes <= QUICK_BYTES:
            job.stage = self._stages.take_ready(job.x_room_bytes, job.y_bytes)
        if job.stage is not None:
            self._launch(job)
        else:
            self._waiting.put(job)
        return await job.future

    def _work(self, jobs: "queue.SimpleQueue[Job | None]") -> None:
        step = self._launch if jobs is self._waiting else self._complete
        while (job := jobs.get()) is not None:
            step(job)

    def _launch(self, job: Job) -> None:
        """Put a batch on its way, without waiting for any of it, nor for what went wrong."""
        try:
            if job.stage is None:
                job.stage = self._stages.take(job.x_room_bytes, job.y_bytes)
            self._enqueue(job, job.stage, alone=False)
        except BaseException as error:
            job.error = error
        self._launched.put(job)

    def _enqueue(self, job: Job, stage: Stage, *, alone: bool) -> None:
        batch = job.batch
        way = TOGETHER if job.others else self._way(job)
        parts: list[int] = []
        for item, start, rows in batch.parts:
            parts.append(self._slab.address_of(item.slot) + start * job.x_row_bytes)
            parts.append(rows)
        if not way.gather:
            started = time.perf_counter_ns()
            job.gather(self._slab, stage.x.host[: job.x_bytes])
            job.gather_nanoseconds = time.perf_counter_ns() - started
        trip = Trip(
            layer=job.layer, stage=stage, parts=parts, rows=batch.rows, more=job.more,
            x_dtype=batch.key.x_dtype, y_dtype=batch.key.output_dtype, way=way, alone=alone,
        )  # fmt: skip
        # One batch after the other, or events of one would measure kernels of both.
        with self._launching:
            self._device.submit(trip)
        job.in_slots = way.scatter

    def _way(self, job: Job) -> Way:
        can_gather = self._sees_slab and self._device.can_gather(job.layer)
        can_scatter = can_gather and self._device.scatters
        batched = Batched(
            job.batch.rows,
            job.y_bytes,
            can_gather=can_gather,
            can_scatter=lambda: can_scatter and job.has_room_in(self._slab),
        )
        return way_of(batched, self._mode)

    def _complete(self, job: Job) -> None:
        """Wait for a batch, copy its results out of the stage, and give that back."""
        stage = job.stage
        if stage is None or job.error is not None:
            self._fail(job, job.error or RuntimeError("a batch without a stage"))
            return
        try:
            self._device.wait(stage.marks)
            results = self._results(job, stage)
        except BaseException as error:
            self._fail(job, error)
        else:
            job.settle(results)

    def _results(self, job: Job, stage: Stage) -> list[BatchResult]:
        """Return what came of batches that have ended, and give their stage back."""
        times = self._device.times(stage.marks)
        started = time.perf_counter_ns()
        if job.in_slots:
            view, row_bytes = self._slab.view, job.y_row_bytes
            rows = [[view(item.slot)[: count * row_bytes] for item, _, count in job.batch.parts]]
        elif job.others:
            rows = split(copied(stage.y.host[: job.y_bytes]), job)
        else:
            y_dtype = job.batch.key.output_dtype
            flat = self._device.results(stage, job.layer, job.batch.rows, y_dtype)
            rows = [split_rows(flat, job.batch)]
        copies = (
            ("gather", job.gather_nanoseconds),
            ("to_device", times.to_device),
            ("from_device", times.from_device),
            ("scatter", time.perf_counter_ns() - started),
        )
        self._stages.give_back(stage)
        if job.others:
            return shared_out(job, rows, times.kernel, copies)
        return [BatchResult(rows[0], times.kernel, copies, job.in_slots, times.kernels)]

    def _fail(self, job: Job, error: BaseException) -> None:
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
        if job.in_slots and not isinstance(told, EngineLost):
            told = ActivationsGone(f"results may lie where activations did: {told}")
        job.settle(told)
