"""The native dispatcher on a real GPU: what a server makes of many calls, without gRPC."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.problems import Form, Problem
from gpu.running import rounded

from qlinear_service.batching import BatchKey, WorkItem
from qlinear_service.config import BatchingConfig, KernelConfig, ServiceConfig
from qlinear_service.dispatch.batcher import DispatchBatcher
from qlinear_service.dtypes import DType
from qlinear_service.engine import WorkerThread
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.kernels.torch_types import from_torch
from qlinear_service.layers import LayerRegistry
from qlinear_service.loaded import Loaded
from qlinear_service.results import Answer, Outcome
from qlinear_service.runners import new_batching
from qlinear_service.slots import Slab

AWKWARD = [(70, 199), (72, 264), (33, 1001), (257, 130), (520, 1000), (64, 63)]
"""n and k: rows at odd addresses, results larger and smaller than their activations."""


class Seen:
    """Metrics that remember who computed how many batches."""

    def __init__(self) -> None:
        self.batches: Counter[str] = Counter()
        self.rows: list[int] = []

    def batch_finished(
        self, layer: str, *, rows: int, transfers: Iterable[tuple[str, int]], **more: Any
    ) -> None:
        is_hosts = "gather" in dict(transfers)
        self.batches["host" if is_hosts else "dispatcher"] += 1
        self.rows.append(rows)
        assert more["kernel_seconds"] > 0
        assert more["is_timed"] or not is_hosts

    def __getattr__(self, name: str) -> Any:
        return lambda *words, **more: None


class Bench:
    """A server's inside over exact problems: each result has one right value."""

    def __init__(self, kernels: RecordingKernels, problems: list[Problem], **batching: Any) -> None:
        self.problems = problems
        layers = [
            replace(problem.layer, spec=replace(problem.layer.spec, module=f"layer{number}"))
            for number, problem in enumerate(problems)
        ]
        self.names = [layer.spec.name for layer in layers]
        self.slab = Slab(capacity_bytes=256 << 20, largest_bytes=1 << 25)
        self.worker, self.seen = WorkerThread("engine"), Seen()
        self.numbers = itertools.count(1)
        self.clock = asyncio.get_running_loop().time
        self.batching = new_batching(
            Loaded(
                registry=LayerRegistry(layers),
                kernels=kernels,  # type: ignore[arg-type]
                gpu=CudaStreams(kernels),
            ),
            ServiceConfig(
                kernels=KernelConfig(device="cuda:0"),
                batching=BatchingConfig(dispatcher="native", **batching),
            ),
            self.slab,
            self.worker,
            clock=self.clock,
            metrics=self.seen,  # type: ignore[arg-type]
        )
        assert isinstance(self.batching.batcher, DispatchBatcher)
        self.batcher = self.batching.batcher
        self.task = asyncio.create_task(self.batcher.run())

    async def call(self, x: torch.Tensor, *numbers: int, output: DType = DType.F32) -> None:
        """Ask for some layers and compare every element of every answer."""
        for each, outcome in zip(numbers, await self.ask(x, *numbers, output=output), strict=True):
            joined = bytearray(b"".join(outcome.pieces))
            y = torch.frombuffer(joined, dtype=torch.float32).view(len(x), -1)
            exact = rounded(self.problems[each].product(x), torch.float32).cpu()
            assert torch.equal(y, exact), (each, len(x), outcome.batch_rows)

    async def ask(self, x: torch.Tensor, *numbers: int, output: DType = DType.F32) -> list[Outcome]:
        """Return the answers of some layers."""
        data = x.contiguous().cpu().view(torch.uint8).numpy().tobytes()
        sizes = [len(x) * self.problems[each].layer.spec.n * output.itemsize for each in numbers]
        slot = self.slab.acquire(max(len(data), sum(sizes)), users=len(numbers))
        self.slab.view(slot)[: len(data)] = data
        items = [
            WorkItem(
                sequence=next(self.numbers),
                key=BatchKey(self.names[each], from_torch(x.dtype), output),
                rows=len(x), slot=slot, nbytes=len(data), enqueued_at=self.clock(),
            )
            for each in numbers
        ]  # fmt: skip
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.batcher.submit(items, done.set_result)
        outcomes = await done
        assert isinstance(outcomes, list), outcomes
        return outcomes

    async def close(self) -> None:
        while self.batcher.items_held:
            await asyncio.sleep(0.001)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        assert self.slab.used_bytes == 0
        assert self.batching.stop(10)
        self.worker.stop(5)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_many_calls_get_their_own_answers(
    kernels: RecordingKernels, permuted: bool, dtype: torch.dtype
) -> None:
    problems = [
        Problem(kernels.device, n, k, Form(group_size=32, permuted=permuted), seed=number)
        for number, (n, k) in enumerate(AWKWARD)
    ]

    async def run() -> None:
        bench = Bench(kernels, problems)

        async def caller(number: int) -> None:
            for turn in range(12):
                layer = (number + turn) % len(problems)
                count = (1, 1, 2, 7, 1, 40)[turn % 6]
                await bench.call(problems[layer].x(count, dtype), layer)

        await asyncio.gather(*map(caller, range(40)))
        await bench.close()
        assert bench.seen.batches["dispatcher"] > 20, bench.seen.batches
        assert max(bench.seen.rows) > 40, "no batch had several calls"

    asyncio.run(run())


@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (4096, 14336), (1000, 4104)])
def test_a_batch_has_the_same_bits_whatever_runs_beside_it(
    kernels: RecordingKernels, n: int, k: int
) -> None:
    """Sums are rounded here, so that their order shows."""
    problem = Problem(kernels.device, n, k, Form(group_size=128))
    x = torch.randn((1, k), generator=torch.Generator().manual_seed(3)).half()

    async def run() -> None:
        bench = Bench(kernels, [problem], max_batch_rows=1)

        async def bits() -> bytes:
            (outcome,) = await bench.ask(x, 0)
            assert outcome.batch_rows == 1
            return b"".join(outcome.pieces)

        alone = await bits()
        for _ in range(10):
            assert set(await asyncio.gather(*(bits() for _ in range(30)))) == {alone}
            assert await bits() == alone
        await bench.close()

    asyncio.run(run())


def test_layers_of_a_call_and_large_calls_are_the_hosts(kernels: RecordingKernels) -> None:
    k = 199
    problems = [Problem(kernels.device, n, k, Form(group_size=32)) for n in (70, 33, 257)]

    async def run() -> None:
        bench = Bench(kernels, problems)
        for turn in range(10):
            x = problems[0].x
            await asyncio.gather(
                bench.call(x(3), 0, 1, 2), bench.call(x(1), 1), bench.call(x(2000), 2, 0),
                bench.call(x(1500), turn % 3), bench.call(x(5), 2),
            )  # fmt: skip
        await bench.close()
        assert bench.seen.batches["host"] > 10

    asyncio.run(run())


def test_the_device_is_fit_for_more_after_a_recovery(kernels: RecordingKernels) -> None:
    """The streams are waited for and the workspace is cleared while nothing is sent."""
    problem = Problem(kernels.device, 70, 199, Form(group_size=32))

    async def run() -> None:
        bench = Bench(kernels, [problem])
        await bench.call(problem.x(1), 0)
        for _ in range(5):
            error = RuntimeError("as if a launch had failed")
            await bench.batcher._engine.recover(error)
            await bench.call(problem.x(3), 0)
        await bench.close()

    asyncio.run(run())
