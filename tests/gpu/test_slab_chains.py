"""Calls for several layers on a real GPU: chains of launches over one x, from the slab and back."""

import asyncio
from typing import Any

import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.problems import Form, Problem
from gpu.running import rounded
from gpu.test_slab_engine import QUICK, Bench

from qlinear_service.batcher import Batcher
from qlinear_service.batching import BatchKey, WorkItem, WorkQueue
from qlinear_service.config import TRANSFERS
from qlinear_service.dtypes import DType
from qlinear_service.results import Answer

K = 199
FEATURES = (70, 33, 257)
CALLS = 300


class NoMetrics:
    """Counts nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *words, **more: None


def batcher_of(bench: Bench, **more: Any) -> Batcher:
    return Batcher(
        queue=WorkQueue(max_batch_rows=64, max_queue_rows=1 << 20, max_age_seconds=60),
        run_batch=bench.engine.run,
        release=lambda item: bench.slab.release(item.slot),
        clock=asyncio.get_running_loop().time,
        metrics=NoMetrics(),  # type: ignore[arg-type]
        most_running=bench.engine.most_in_flight,
        run_lone=bench.engine.run_lone,
        is_lone=bench.engine.is_lone,
        most_chained=bench.engine.most_chained,
        **more,
    )


@pytest.mark.parametrize("mode", TRANSFERS)
def test_layers_of_a_call_are_never_mixed_up(kernels: RecordingKernels, mode: str) -> None:
    """Some calls ask for three layers, some for two or one, with orders of their own."""
    problems = [
        Problem(kernels.device, n, K, Form(group_size=32, permuted=number != 1), seed=number)
        for number, n in enumerate(FEATURES)
    ]
    bench = Bench(kernels, problems, mode=mode, roofline=QUICK)

    async def caller(batcher: Batcher, number: int) -> None:
        layers = ((0, 1, 2), (2, 0), (1,), (1, 2, 0))[number % 4]
        x = problems[0].x(1 + number % 7)
        data = x.cpu().view(torch.uint8).numpy().tobytes()
        slot = bench.slab.acquire(4 * len(x) * sum(FEATURES), users=len(layers))
        bench.slab.view(slot)[: len(data)] = data
        now = asyncio.get_running_loop().time()
        items = [
            WorkItem(
                sequence=next(bench.numbers), key=BatchKey(f"layer{each}", DType.F16, DType.F32),
                rows=len(x), slot=slot, nbytes=len(data), enqueued_at=now,
            )
            for each in layers
        ]  # fmt: skip
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        batcher.submit(items, done.set_result)
        outcomes = await done
        assert isinstance(outcomes, list), outcomes
        for each, outcome in zip(layers, outcomes, strict=True):
            joined = bytearray(b"".join(outcome.pieces))
            y = torch.frombuffer(joined, dtype=torch.float32).view(len(x), -1)
            exact = rounded(problems[each].product(x), torch.float32)
            assert torch.equal(y, exact.cpu()), (number, each)

    async def run() -> None:
        batcher = batcher_of(bench)
        task = asyncio.create_task(batcher.run())
        for start in range(0, CALLS, 30):
            await asyncio.gather(*(caller(batcher, start + i) for i in range(30)))
        await caller(batcher, 2)
        assert batcher.items_held == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert bench.slab.used_bytes == 0
    bench.close()
