"""Batches that are computed together, by an engine of the test's making: what failures mean."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from measured_layers import Spec, metrics_of

from qlinear_service.batcher import Batcher
from qlinear_service.batching import Batch, BatchKey, WorkItem, WorkQueue
from qlinear_service.dtypes import DType
from qlinear_service.errors import ActivationsGone, EngineFailure, EngineLost, Unavailable
from qlinear_service.results import Answer, BatchResult
from qlinear_service.slots import Slot

LAYERS = [BatchKey(f"m/{name}", DType.F16, DType.F16) for name in "abc"]


class Engine:
    """Answers each part with its layer and its call; fails as it is told."""

    def __init__(self) -> None:
        self.together: list[list[str]] = []
        self.alone: list[tuple[str, int]] = []
        self.takes = True
        self.spoilt: Exception | None = None
        """Why batches cannot be computed together."""
        self.lost_at = 0
        """The batch of its own, counted from 1, at which the device is lost."""
        self.short = 0
        """Results that are left out."""

    def goes_together(self, batches: Sequence[Batch]) -> bool:
        return self.takes

    async def run_together(self, batches: Sequence[Batch]) -> list[BatchResult]:
        self.together.append([batch.key.layer for batch in batches])
        await asyncio.sleep(0)
        if self.spoilt is not None:
            raise self.spoilt
        return [self.result(batch) for batch in batches][: len(batches) - self.short]

    async def run(self, batch: Batch) -> BatchResult:
        self.alone.append((batch.key.layer, len(batch.parts)))
        await asyncio.sleep(0)
        if len(self.alone) == self.lost_at:
            raise EngineLost("gone")
        return self.result(batch)

    @staticmethod
    def result(batch: Batch) -> BatchResult:
        names = (f"{batch.key.layer} {part.item.slot.index}" for part in batch.parts)
        return BatchResult([memoryview(name.encode()) for name in names], 1000)


class Bench:
    """A batcher over such an engine, and a way to send calls for three layers."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.released: list[int] = []
        self.numbers = itertools.count(1)
        self.batcher = Batcher(
            queue=WorkQueue(max_batch_rows=8, max_queue_rows=100, max_age_seconds=60),
            run_batch=self.engine.run,
            release=lambda item: self.released.append(item.sequence),
            clock=asyncio.get_running_loop().time,
            metrics=metrics_of(*(Spec(name, n=8) for name in "abc")),
            most_running=2,
            most_chained=2,
            together=self.engine,
        )
        self.task = asyncio.create_task(self.batcher.run())

    def call(self, number: int) -> asyncio.Future[Any]:
        items = [
            WorkItem(
                sequence=next(self.numbers), key=key, rows=1, slot=Slot(number, 0), nbytes=1,
                enqueued_at=asyncio.get_running_loop().time(),
            )
            for key in LAYERS
        ]  # fmt: skip
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def settle(answer: Answer) -> None:
            if isinstance(answer, list):
                future.set_result([bytes(outcome.pieces[0]).decode() for outcome in answer])
            else:
                future.set_exception(answer)

        self.batcher.submit(items, settle)
        return future


@pytest.fixture
async def bench() -> Any:
    made = Bench()
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)
    assert made.batcher.items_held == 0
    assert len(made.released) == len(set(made.released))


def expected(number: int) -> list[str]:
    return [f"m/{name} {number}" for name in "abc"]


async def test_all_layers_of_all_calls_are_computed_at_once(bench: Bench) -> None:
    found = await asyncio.gather(*map(bench.call, range(3)))
    assert found == [expected(number) for number in range(3)]
    assert bench.engine.together == [["m/a", "m/b", "m/c"]]
    assert bench.engine.alone == []
    bench.engine.takes = False
    assert await bench.call(7) == expected(7)
    assert bench.engine.alone == [("m/a", 1), ("m/b", 1), ("m/c", 1)]


@pytest.mark.parametrize("why", ["an error", "a result too few", "cancelled from inside"])
async def test_what_fails_together_is_computed_part_by_part(bench: Bench, why: str) -> None:
    if why == "an error":
        bench.engine.spoilt = ValueError("no")
    elif why == "a result too few":
        bench.engine.short = 1
    else:
        bench.engine.spoilt = asyncio.CancelledError()  # type: ignore[assignment]
    found = await asyncio.gather(*map(bench.call, range(2)))
    assert found == [expected(number) for number in range(2)]
    assert bench.engine.alone == [(f"m/{name}", 1) for name in "aabbcc"]


async def test_a_call_that_has_been_left_is_not_tried_again(bench: Bench) -> None:
    bench.engine.spoilt = ValueError("no")
    told = bench.call(1)
    other = bench.call(2)
    while not bench.engine.together:
        await asyncio.sleep(0)
    bench.batcher.cancel([bench.batcher._ledger.item(number) for number in (1, 2, 3)])
    assert await other == expected(2)
    assert len(bench.engine.alone) == 3
    assert not told.done()


async def test_activations_that_are_gone_are_not_multiplied_again(bench: Bench) -> None:
    bench.engine.spoilt = ActivationsGone("written over")
    for outcome in await asyncio.gather(*map(bench.call, range(2)), return_exceptions=True):
        assert isinstance(outcome, EngineFailure)
    assert bench.engine.alone == []


@pytest.mark.parametrize("lost_at", [0, 1, 4])
async def test_a_device_that_is_lost_leaves_nothing_behind(bench: Bench, lost_at: int) -> None:
    """At once, or while parts are tried alone: every slot comes back, every call is told."""
    bench.engine.lost_at = lost_at
    bench.engine.spoilt = ValueError("no") if lost_at else EngineLost("gone")
    told = [bench.call(number) for number in range(2)]
    with pytest.raises(EngineLost):
        await bench.task
    for outcome in await asyncio.gather(*told, return_exceptions=True):
        assert isinstance(outcome, Unavailable)
    assert sorted(bench.released) == list(range(1, 7))
