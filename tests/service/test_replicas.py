"""Engines side by side: who gets which batch, how many each holds, and what a lost one means."""

import asyncio
import itertools
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, open_gates
from measured_layers import metrics_of
from several_gpus import LAYERS, batch_of, cpu_kernels, draw
from told import told_by

from qlinear_service.batcher import Batcher
from qlinear_service.batching import Batch, BatchKey, WorkItem, WorkQueue
from qlinear_service.config import ServiceConfig
from qlinear_service.dtypes import DType
from qlinear_service.errors import EngineLost, OutOfDeviceMemory
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.gpu.replicas import ReplicaRunner
from qlinear_service.gpu.ways import AUTO
from qlinear_service.kernels.backends import TorchKernels
from qlinear_service.layers import LayerRegistry
from qlinear_service.loaded import Loaded, Replica
from qlinear_service.measured import MeasuredDevice
from qlinear_service.results import BatchResult, Outcome
from qlinear_service.runners import new_runner
from qlinear_service.slots import Slab

NAMES = ("cuda:0", "cuda:1")
UP, ORDERED = "test/up", "test/ordered"


class Held:
    """An engine whose batches end when they are told to."""

    most_in_flight, most_chained = 2, 3

    def __init__(self, stops: bool = True) -> None:
        self.futures: list[asyncio.Future[BatchResult]] = []
        self.lone = 0
        self.stops = stops
        self.stopped: list[float] = []

    async def run(self, batch: Batch) -> BatchResult:
        self.futures.append(asyncio.get_running_loop().create_future())
        return await self.futures[-1]

    def is_lone(self, batch: Batch) -> bool:
        return True

    async def run_lone(self, batch: Batch) -> BatchResult:
        self.lone += 1
        return BatchResult([], 7)

    def stop(self, timeout_seconds: float) -> bool:
        self.stopped.append(timeout_seconds)
        return self.stops


async def test_a_batch_goes_where_the_fewest_are() -> None:
    first, second = Held(), Held()
    runner = ReplicaRunner({"cuda:0": first, "cuda:1": second})
    assert (runner.most_in_flight, runner.most_chained) == (4, 3)
    batch: Any = None
    running = [asyncio.create_task(runner.run(batch)) for _ in range(5)]
    await asyncio.sleep(0)
    assert (len(first.futures), len(second.futures)) == (3, 2)
    for future in first.futures:
        future.set_result(BatchResult([], 100))
    second.futures[0].set_exception(RuntimeError("failed"))
    found = await asyncio.gather(*running[:3], running[4], return_exceptions=True)
    named = [one.launches if isinstance(one, BatchResult) else str(one) for one in found]
    assert named == [(("cuda:0", 100),), "failed", (("cuda:0", 100),), (("cuda:0", 100),)]
    running[3].cancel()
    await asyncio.gather(running[3], return_exceptions=True)
    again = asyncio.create_task(runner.run(batch))
    await asyncio.sleep(0)
    assert len(first.futures) == 4, "batches that failed or were cancelled are over"
    again.cancel()


async def test_lone_batches_too() -> None:
    first, second = Held(), Held()
    runner = ReplicaRunner({"cuda:0": first, "cuda:1": second})
    batch: Any = None
    busy = asyncio.create_task(runner.run(batch))
    await asyncio.sleep(0)
    assert runner.is_lone(batch)
    assert (await runner.run_lone(batch)).launches == (("cuda:1", 7),)
    assert (first.lone, second.lone) == (0, 1)
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    assert (await runner.run_lone(batch)).launches == (("cuda:0", 7),), "what was cancelled is over"


@pytest.mark.parametrize("hangs", [0, 1])
def test_all_engines_are_stopped_whichever_hangs(hangs: int) -> None:
    engines = [Held(), Held()]
    engines[hangs].stops = False
    assert not ReplicaRunner(dict(zip(NAMES, engines, strict=True))).stop(3)
    assert all(0 < engine.stopped[0] <= 3 for engine in engines)
    engines[hangs].stops = True
    assert ReplicaRunner(dict(zip(NAMES, engines, strict=True))).stop(3)


class Bench:
    """Two engines with all layers each, one slab, and a batcher in front of them."""

    def __init__(self) -> None:
        self.kernels = cpu_kernels()
        self.slab = Slab(capacity_bytes=1 << 26, largest_bytes=1 << 22)
        self.gpus = [FakeGpu(self.kernels.linear) for _ in NAMES]
        self.engines = {
            name: GpuEngine(
                device=gpu, registry=LayerRegistry(LAYERS.values()), slab=self.slab, mode=AUTO
            )
            for name, gpu in zip(NAMES, self.gpus, strict=True)
        }
        self.runner = ReplicaRunner(self.engines)
        self.numbers = itertools.count(1)
        self.released: list[int] = []
        metrics = metrics_of(devices=[MeasuredDevice(name=name) for name in NAMES])
        metrics.layers = dict(LAYERS)
        self.batcher = Batcher(
            queue=WorkQueue(max_batch_rows=64, max_queue_rows=1 << 20, max_age_seconds=60),
            run_batch=self.runner.run,
            release=self.release,
            clock=asyncio.get_running_loop().time,
            metrics=metrics,
            most_running=self.runner.most_in_flight,
            most_chained=self.runner.most_chained,
        )
        self.task = asyncio.create_task(self.batcher.run())

    def release(self, item: WorkItem) -> None:
        self.released.append(item.sequence)
        self.slab.release(item.slot)

    def call(self, x: torch.Tensor, *names: str) -> asyncio.Future[list[Outcome]]:
        """Send one call for several layers, whose items share a slot."""
        items = []
        for name in names:
            key = BatchKey(name, DType.F16, DType.F16)
            (part,) = batch_of(self.slab, self.numbers, key, [x]).parts
            part.item.enqueued_at = asyncio.get_running_loop().time()
            items.append(part.item)
        for item in items[1:]:
            self.slab.release(item.slot)
            item.slot = items[0].slot
        self.slab._records[items[0].slot.index].users = len(items)
        return told_by(self.batcher.submit, items)

    # Not plain layers: torch adds up in an order that depends on the rows of a batch.
    def check(self, outcomes: list[Outcome], x: torch.Tensor, *names: str) -> None:
        for outcome, name in zip(outcomes, names, strict=True):
            data = bytearray(b"".join(outcome.pieces))
            expected = self.kernels.linear(LAYERS[name], x, DType.F16)
            y = torch.frombuffer(data, dtype=torch.float16).view(expected.shape)
            assert torch.equal(y, expected)

    async def end(self) -> None:
        for gpu in self.gpus:
            open_gates(gpu)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        assert self.runner.stop(5)
        assert len(self.released) == len(set(self.released))


async def test_many_callers_of_many_layers_get_the_bits_of_one_device() -> None:
    bench = Bench()
    most = dict.fromkeys(NAMES, 0)

    async def caller(place: int) -> None:
        for turn in range(8):
            x = draw(100 * place + turn, 1 + (place + turn) % 5)
            names = [(UP,), (UP, ORDERED), (ORDERED, "test/wide", "test/narrow", UP)][turn % 3]
            bench.check(await bench.call(x, *names), x, *names)
            for name, count in bench.runner._running.items():
                most[name] = max(most[name], count)

    await asyncio.gather(*map(caller, range(24)))
    assert bench.batcher.items_held == 0
    assert bench.slab.used_bytes == 0
    assert all(gpu.trips for gpu in bench.gpus), "both compute"
    assert max(most.values()) <= bench.engines["cuda:0"].stage_count
    await bench.end()


async def test_no_engine_is_given_more_than_it_holds() -> None:
    """Everything that may be in flight is, and chains with it."""
    bench = Bench()
    for gpu in bench.gpus:
        gpu.gates["kernel"].clear()
    names = ("test/wide", "test/narrow", UP, ORDERED)
    x = draw(1, 2)
    calls = [bench.call(x, *names[i % 4 :], *names[: i % 4]) for i in range(20)]
    for _ in range(200):
        await asyncio.sleep(0)
    counts = bench.runner._running
    assert sum(counts.values()) >= bench.runner.most_in_flight
    assert max(counts.values()) <= bench.engines["cuda:0"].stage_count
    for gpu in bench.gpus:
        open_gates(gpu)
    for i, call in enumerate(calls):
        bench.check(await call, x, *names[i % 4 :], *names[: i % 4])
    await bench.end()


async def test_a_lost_device_ends_the_batches_of_all() -> None:
    bench = Bench()
    x = draw(1, 2)
    bench.check(await bench.call(x, UP), x, UP)
    bench.gpus[0].lost = bench.gpus[1].lost = True
    with pytest.raises(Exception, match="lost its device"):
        await bench.call(x, UP)
    with pytest.raises(EngineLost):
        await asyncio.wait_for(bench.task, 20)
    assert bench.runner.stop(5)


def test_a_second_device_without_room_ends_what_the_first_has_begun() -> None:
    gpus = {name: FakeGpu() for name in NAMES}
    gpus["cuda:1"].memory_bytes = 1 << 20
    registry = LayerRegistry(LAYERS.values())
    loaded = Loaded(
        registry=registry,
        kernels=TorchKernels(),
        gpu=gpus["cuda:0"],
        replicas=tuple(Replica(name, gpu, registry) for name, gpu in gpus.items()),
    )
    slab = Slab(capacity_bytes=1 << 20, largest_bytes=1 << 16)
    worker: Any = None
    with pytest.raises(OutOfDeviceMemory, match="no room for the buffers of 2 batches"):
        new_runner(loaded, ServiceConfig(), slab, worker)
    assert gpus["cuda:0"].admitted == (0, 0), "kernels may write where no slab is any more"
    gpus["cuda:1"].memory_bytes = 1 << 40
    gpus["cuda:1"].allocated.clear()
    runner = new_runner(loaded, ServiceConfig(), slab, worker)
    assert isinstance(runner, ReplicaRunner)
    assert runner.most_in_flight == 4
    assert runner.stop(5)
