"""Batches that go straight from the slab and back: awkward layers, many in flight, faults."""

import asyncio
import itertools
import logging
from collections.abc import Iterator

import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.problems import Form, Problem
from gpu.running import rounded

from qlinear_service.batching import Batch, BatchKey, Part, WorkItem
from qlinear_service.config import TRANSFERS
from qlinear_service.dtypes import DType
from qlinear_service.gpu import engine as gpu_engine
from qlinear_service.gpu import stages
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.gpu.ways import PINNED, SLAB
from qlinear_service.kernels.cuda_abi import Status
from qlinear_service.kernels.torch_types import from_torch
from qlinear_service.layers import LayerRegistry
from qlinear_service.results import BatchResult
from qlinear_service.roofline import Roofline
from qlinear_service.slots import Slab

QUICK = Roofline(sizes_bytes=(1, 1 << 40), read_seconds=(1e-6, 1e-6), products_per_second=1e15)
AWKWARD = [(70, 199), (72, 264), (33, 1001), (257, 130), (520, 1000), (64, 63)]
"""n and k: rows at odd addresses, results larger and smaller than their activations."""


class Bench:
    """An engine over exact problems: each result has one right value, whatever the plan."""

    def __init__(
        self, kernels: RecordingKernels, problems: list[Problem], **options: object
    ) -> None:
        self.kernels, self.problems = kernels, problems
        self.slab = Slab(capacity_bytes=256 << 20, largest_bytes=1 << 25)
        self.registry = LayerRegistry()
        for number, problem in enumerate(problems):
            self.registry._by_name[f"layer{number}"] = problem.layer
        self.streams = CudaStreams(kernels)
        self.engine = GpuEngine(
            device=self.streams,
            registry=self.registry,
            slab=self.slab,
            **options,  # type: ignore[arg-type]
        )
        self.numbers = itertools.count(1)

    def batch(
        self, number: int, *xs: torch.Tensor, output: DType = DType.F32, users: int = 1
    ) -> Batch:
        """Return a batch with a slot for each x, as large as x or its result needs."""
        spec = self.problems[number].layer.spec
        key = BatchKey(f"layer{number}", from_torch(xs[0].dtype), output)
        parts = []
        for x in xs:
            data = x.contiguous().cpu().view(torch.uint8).numpy().tobytes()
            slot = self.slab.acquire(max(len(data), len(x) * spec.n * output.itemsize), users=users)
            self.slab.view(slot)[: len(data)] = data
            item = WorkItem(sequence=next(self.numbers), key=key, rows=len(x), slot=slot,
                            nbytes=len(data), enqueued_at=0.0)  # fmt: skip
            parts.append(Part(item, 0, len(x)))
        return Batch(key, tuple(parts), sum(map(len, xs)))

    def check(self, number: int, batch: Batch, result: BatchResult, *xs: torch.Tensor) -> None:
        for part, piece, x in zip(batch.parts, result.rows, xs, strict=True):
            y = torch.frombuffer(bytearray(piece), dtype=torch.float32).view(len(x), -1)
            exact = self.problems[number].product(x)
            assert torch.equal(y, rounded(exact, torch.float32).cpu()), (number, len(x))
            self.slab.view(part.item.slot)[:] = b"\xff" * len(self.slab.view(part.item.slot))
            self.slab.release(part.item.slot)

    def close(self) -> None:
        assert self.engine.stop(10)
        assert self.engine._stages.free == self.engine.stage_count


@pytest.fixture(scope="module")
def problems(kernels: RecordingKernels) -> list[Problem]:
    made = []
    for number, (n, k) in enumerate(AWKWARD):
        form = Form(group_size=32, permuted=number % 2 == 1, bits=8 if number % 3 == 2 else 4)
        made.append(Problem(kernels.device, n, k, form, seed=number))
    return made


@pytest.fixture(params=TRANSFERS)
def bench(
    kernels: RecordingKernels, problems: list[Problem], request: pytest.FixtureRequest
) -> Iterator[Bench]:
    made = Bench(kernels, problems, mode=request.param, roofline=QUICK)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_lone", [False, True])
def test_awkward_layers_one_after_the_other(
    bench: Bench, dtype: torch.dtype, is_lone: bool
) -> None:
    async def run() -> None:
        for number, problem in enumerate(bench.problems):
            for sizes in ((1,), (2, 1), (3, 5, 1, 7), (1,) * 64, (1,) * 70, (90, 1, 33)):
                xs = [problem.x(m, dtype) for m in sizes]
                batch = bench.batch(number, *xs)
                run = bench.engine.run_lone if is_lone else bench.engine.run
                bench.check(number, batch, await run(batch), *xs)

    asyncio.run(run())


def test_a_lone_batch_is_answered_without_a_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_engine, "LONE_SECONDS", 5.0)
    handed: list[object] = []
    monkeypatch.setattr(bench.engine, "_launched", type("", (), {"put": handed.append})())

    async def run() -> None:
        x = bench.problems[0].x(1)
        batch = bench.batch(0, x)
        assert bench.engine.is_lone(batch)
        result = await bench.engine.run_lone(batch)
        assert not handed
        assert result.kernel_nanoseconds > 0
        assert result.in_slots == (bench.engine._mode != PINNED)
        bench.check(0, batch, result, x)

    asyncio.run(run())
    monkeypatch.undo()


def test_results_that_others_read_stay_out_of_their_slots(
    kernels: RecordingKernels, problems: list[Problem]
) -> None:
    bench = Bench(kernels, problems, mode=SLAB)

    async def run() -> None:
        x = problems[0].x(5)
        batch = bench.batch(0, x, users=2)
        slot = batch.parts[0].item.slot
        before = bytes(bench.slab.view(slot))
        result = await bench.engine.run(batch)
        assert not result.in_slots
        assert bytes(bench.slab.view(slot)) == before
        bench.slab.release(slot)
        result = await bench.engine.run(batch)
        assert result.in_slots
        bench.check(0, batch, result, x)

    asyncio.run(run())
    bench.close()


@pytest.mark.parametrize("mode", TRANSFERS)
def test_a_thousand_batches_in_flight(
    kernels: RecordingKernels,
    problems: list[Problem],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """All are launched while the first waits for a kernel that takes long."""
    monkeypatch.setattr(stages, "FIRST_BYTES", 1 << 14)
    bench = Bench(kernels, problems, mode=mode, stages=1000)

    async def one(number: int, xs: list[torch.Tensor], batch: Batch) -> None:
        bench.check(number, batch, await bench.engine.run(batch), *xs)

    async def run() -> None:
        waiting = []
        for turn in range(1000):
            number = turn % len(problems)
            xs = [problems[number].x(1 + turn % 5), problems[number].x(1)]
            waiting.append((number, xs, bench.batch(number, *xs)))
        with torch.cuda.stream(bench.streams._compute):
            torch.cuda._sleep(200_000_000)
        await asyncio.gather(*(one(*words) for words in waiting))

    asyncio.run(run())
    bench.close()


def test_a_stale_slot_reaches_nothing(kernels: RecordingKernels, problems: list[Problem]) -> None:
    bench = Bench(kernels, problems, mode=SLAB)

    async def run() -> None:
        x = problems[0].x(2)
        stale = bench.batch(0, x)
        bench.slab.release(stale.parts[0].item.slot)
        owner = bench.batch(0, x)
        assert owner.parts[0].item.slot.index == stale.parts[0].item.slot.index
        with pytest.raises(RuntimeError, match="stale"):
            await bench.engine.run(stale)
        bench.check(0, owner, await bench.engine.run(owner), x)

    asyncio.run(run())
    bench.close()


def test_a_slab_that_cannot_be_registered_serves_through_copies(
    kernels: RecordingKernels, problems: list[Problem], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    register = CudaStreams.admit

    def twice(self: CudaStreams, address: int, nbytes: int) -> str:
        assert register(self, address, nbytes) == ""
        return register(self, address, nbytes)  # what is registered already cannot be again

    monkeypatch.setattr(CudaStreams, "admit", twice)
    with caplog.at_level(logging.WARNING):
        bench = Bench(kernels, problems, mode=SLAB)
    assert "slab_not_registered" in caplog.text
    assert "already" in caplog.text

    async def run() -> None:
        for number in range(len(problems)):
            x = problems[number].x(3)
            batch = bench.batch(number, x)
            result = await bench.engine.run(batch)
            assert not result.in_slots
            bench.check(number, batch, result, x)

    asyncio.run(run())
    bench.close()
    assert kernels.library.ql_cuda_unregister(bench.slab.address, 0) == Status.OK


def test_a_failed_launch_leaves_the_activations_alone(
    kernels: RecordingKernels, problems: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch can be tried again: nothing was written over what it needs."""
    bench = Bench(kernels, problems, mode=SLAB)
    broken = bench.streams._express._prepare

    def without_weights(trip: object) -> object:
        made = broken(trip)  # type: ignore[arg-type]
        made.batch.product.contents.qweight = None
        return made

    async def run() -> None:
        x = problems[0].x(4)
        batch = bench.batch(0, x)
        with monkeypatch.context() as patch:
            patch.setattr(bench.streams._express, "_prepare", without_weights)
            with pytest.raises(RuntimeError, match="null"):
                await bench.engine.run(batch)
        for stage in bench.engine._stages._free:
            stage.prepared.clear()
        bench.check(0, batch, await bench.engine.run(batch), x)

    asyncio.run(run())
    bench.close()
