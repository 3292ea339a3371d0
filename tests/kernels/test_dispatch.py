"""The native dispatcher with a library that pretends to be a GPU's: answers, ways, order, ends."""

import asyncio
import ctypes
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from dispatch_bench import (
    DENSE_NAME,
    ORDERED_NAME,
    PLAIN,
    PLAIN_NAME,
    DispatchBench,
    Make,
    check,
    rows,
)
from fake_cuda import HostKernels

from qlinear_service.dtypes import DType
from qlinear_service.errors import DeadlineExceeded, Overloaded
from qlinear_service.gpu.direct import LEAST_TO_SPARE, SPARE, TAUGHT_ROWS
from qlinear_service.kernels.cuda_abi import CudaBatch, CudaPlan


async def test_a_lone_call_is_on_its_way_in_the_same_turn(make: Make) -> None:
    bench = make()
    told = bench.call(rows(1))
    assert bench.library.fake_row_gathers() == 1, "without a turn of the event loop"
    (outcome,) = await told
    check(outcome, rows(1), PLAIN_NAME)
    assert (outcome.batch_rows, outcome.kernel_nanoseconds > 0) == (1, True)
    await bench.all_left()
    assert bench.slab.used_bytes == 0


async def test_what_comes_after_the_clock_was_read_has_not_waited(make: Make) -> None:
    bench = make()
    items = bench.items(rows(1), (PLAIN_NAME,))
    (outcome,) = await bench.submit([replace(items[0], enqueued_at=bench.clock() + 1)])
    check(outcome, rows(1), PLAIN_NAME)
    assert outcome.queue_nanoseconds == 0


@pytest.mark.parametrize("output", list(DType))
@pytest.mark.parametrize("x_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", [PLAIN_NAME, ORDERED_NAME, DENSE_NAME])
async def test_each_call_gets_its_own_answer(
    make: Make, name: str, x_dtype: torch.dtype, output: DType
) -> None:
    bench = make(max_batch_rows=32)
    sizes = [1, 1, 2, 3, 7, 1, 100, 1, 33, 1] * 3
    calls = []
    for seed, count in enumerate(sizes):
        x = rows(seed, count, x_dtype)
        calls.append((x, bench.call(x, name, output=output)))
        if seed % 4 == 0:
            await asyncio.sleep(0)
    for x, told in calls:
        (outcome,) = await told
        check(outcome, x, name, output)
        assert outcome.queue_nanoseconds >= 0
    await bench.all_left()
    assert bench.slab.used_bytes == 0
    assert len(bench.released) == len(sizes)


async def test_small_calls_of_quantized_layers_never_pass_through_python(make: Make) -> None:
    bench = make()
    ran: list[int] = []
    run = bench.batcher._engine._engine.run  # type: ignore[attr-defined]

    async def noted(batch: object) -> object:
        ran.append(batch.rows)  # type: ignore[attr-defined]
        return await run(batch)

    bench.batcher._engine._engine.run = noted  # type: ignore[attr-defined]
    for count in (1, 5, TAUGHT_ROWS):
        for name in (PLAIN_NAME, ORDERED_NAME):
            await bench.call(rows(count, count), name)
    assert ran == []
    await bench.call(rows(1), DENSE_NAME)
    await bench.call(rows(1), PLAIN_NAME, ORDERED_NAME)
    assert ran == [1, 1, 1]
    # What is not known yet is taught when it first comes.
    for _ in range(3):
        (outcome,) = await bench.call(rows(9, TAUGHT_ROWS + 1))
        check(outcome, rows(9, TAUGHT_ROWS + 1), PLAIN_NAME)
    assert ran == [1, 1, 1, TAUGHT_ROWS + 1]


@pytest.mark.parametrize("spins", [False, True])
async def test_what_waits_while_all_stages_are_in_use_is_one_batch(make: Make, spins: bool) -> None:
    bench = make(max_batches_in_flight=1, spins=spins)
    bench.library.fake_hang(1)
    first = bench.call(rows(0))
    calls = [(rows(seed, 2), bench.call(rows(seed, 2))) for seed in range(1, 6)]
    await asyncio.sleep(0.02)
    assert not any(told.done() for _, told in calls)
    assert bench.batching.queue_rows() == {PLAIN_NAME: 10}
    bench.library.fake_hang(0)
    assert (await first)[0].batch_rows == 1
    for x, told in calls:
        (outcome,) = await told
        check(outcome, x, PLAIN_NAME)
        assert outcome.batch_rows == 10
        assert outcome.queue_nanoseconds > 10e6
    assert not any(bench.batching.queue_rows().values())


Way = tuple[int, int, int]

SMS = 132
"""Of the device that the library pretends to have, whose plans take all of them."""


class Sent:
    """How batches are sent: thread blocks of the product, most blocks of rows in and out."""

    def __init__(self, bench: DispatchBench) -> None:
        self.bench = bench
        bench.library.fake_hang(1)

    def last(self) -> Way:
        batch = CudaBatch()
        self.bench.library.fake_last_batch(ctypes.byref(batch))
        return batch.launch.plan[0].ctas, batch.x.most_blocks, batch.y.most_blocks

    async def two(self, x: torch.Tensor, **more: Any) -> tuple[Way, Way]:
        """Return how a batch is sent, and one that finds it on the device."""
        first, alone = self.bench.call(x, **more), self.last()
        second = self.bench.call(x, **more)
        await asyncio.sleep(0.02)
        assert self.bench.library.fake_row_gathers() == 2
        beside = self.last()
        self.bench.library.fake_hang(0)
        for told in (first, second):
            check((await told)[0], x, PLAIN_NAME, **more)
        return alone, beside


@pytest.mark.parametrize(
    ("dtype", "output", "blocks"),
    [
        # 80 bytes in and 48 out share the four blocks, 160 and 48, 80 and 96.
        (torch.float16, DType.F16, (3, 1)),
        (torch.float32, DType.F16, (3, 1)),
        (torch.float16, DType.F32, (2, 2)),
    ],
)
async def test_beside_others_rows_move_on_the_multiprocessors_that_products_leave(
    make: Make, dtype: torch.dtype, output: DType, blocks: tuple[int, int]
) -> None:
    bench = make()
    engine: Any = bench.batcher._engine
    x_dtype = DType.F16 if dtype == torch.float16 else DType.F32
    engine.teach(PLAIN, x_dtype, output)
    alone, beside = await Sent(bench).two(rows(1, 1, dtype), output=output)
    assert alone == (SMS - SPARE, 0, 0), "as many blocks as it takes"
    assert beside == (SMS - SPARE, *blocks), "the same product: the same bits"
    assert sum(blocks) == SPARE


async def test_a_small_device_and_batch_invariant_products_leave_nothing(
    make: Make,
    kernels: HostKernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels.info, "sm_count", LEAST_TO_SPARE - 1)
    assert await Sent(make()).two(rows(1)) == ((LEAST_TO_SPARE - 1, 0, 0),) * 2
    monkeypatch.setattr(kernels.info, "sm_count", LEAST_TO_SPARE)
    assert (await Sent(make()).two(rows(1)))[1] == (LEAST_TO_SPARE - SPARE, 3, 1)
    monkeypatch.setattr(kernels, "batch_invariant", True)
    assert await Sent(make()).two(rows(1)) == ((LEAST_TO_SPARE, 0, 0),) * 2


async def test_what_the_host_computes_has_the_same_plan(make: Make) -> None:
    bench = make()
    plan = CudaPlan()
    for _ in range(2):  # the first batch of its kind comes back, and is taught then
        await bench.call(rows(1, TAUGHT_ROWS + 1))
        bench.library.fake_last_plan(ctypes.byref(plan))
        assert plan.ctas == SMS - SPARE


async def test_layers_of_a_call_follow_each_other_and_are_answered_in_order(make: Make) -> None:
    bench = make()
    names = (PLAIN_NAME, DENSE_NAME, ORDERED_NAME)
    calls = [(seed, bench.call(rows(seed, 3), *names)) for seed in range(20)]
    for seed, told in calls:
        for name, outcome in zip(names, await told, strict=True):
            check(outcome, rows(seed, 3), name)
    await bench.all_left()
    assert bench.slab.used_bytes == 0


@pytest.mark.parametrize("spins", [False, True])
async def test_deadlines_and_ages_end_what_waits_and_nothing_else(make: Make, spins: bool) -> None:
    bench = make(max_batches_in_flight=1, age=0.1, spins=spins)
    bench.library.fake_hang(1)
    first = bench.call(rows(0))
    late = bench.call(rows(1), deadline=bench.clock() + 0.02)
    old = bench.call(rows(2))
    with pytest.raises(DeadlineExceeded, match="it was not computed"):
        await late
    with pytest.raises(Overloaded, match=r"longer than max_queue_age \(0.1 s\)"):
        await old
    bench.library.fake_hang(0)
    check((await first)[0], rows(0), PLAIN_NAME)
    assert bench.library.fake_row_gathers() == 1
    await bench.all_left()
    assert sorted(bench.released) == [1, 2, 3]


async def test_a_full_queue_refuses_and_queues_nothing(make: Make) -> None:
    bench = make(max_batches_in_flight=1)
    bench.batcher._queue._max_queue_rows = 4
    bench.library.fake_hang(1)
    calls = [bench.call(rows(0)), bench.call(rows(1, 3))]
    items = bench.items(rows(2, 2), (PLAIN_NAME,))
    with pytest.raises(Overloaded, match="3 rows wait and this call brings 2; at most 4"):
        bench.submit(items)
    bench.slab.release(items[0].slot)
    assert bench.batcher.items_held == 2
    bench.library.fake_hang(0)
    await asyncio.gather(*calls)


async def test_what_is_taken_back_never_runs(make: Make) -> None:
    bench = make(max_batches_in_flight=1)
    bench.library.fake_hang(1)
    first = bench.call(rows(0))
    waiting, leaving = bench.items(rows(1), (PLAIN_NAME,)), bench.items(rows(2), (PLAIN_NAME,))
    withdrawn, _ = bench.submit(waiting), bench.submit(leaving)
    running = bench.batcher._ledger.item(1)
    assert bench.batcher.withdraw(waiting)
    assert not bench.batcher.withdraw([running])
    bench.batcher.cancel(leaving)
    assert sorted(bench.released) == [2, 3], "at once"
    bench.batcher.cancel([running])
    assert sorted(bench.released) == [2, 3], "the device may still touch it"
    bench.library.fake_hang(0)
    await bench.all_left()
    assert sorted(bench.released) == [1, 2, 3]
    assert not first.done(), "its caller had left"
    with pytest.raises(Exception, match="taken back"):
        await withdrawn
    assert bench.library.fake_row_gathers() == 1


@pytest.mark.parametrize("spins", [False, True])
async def test_many_clients_that_come_and_go_are_never_mixed_up(make: Make, spins: bool) -> None:
    bench = make(max_batch_rows=16, spins=spins)
    answered = 0

    async def client(number: int) -> None:
        nonlocal answered
        for turn in range(30):
            seed = 1000 * number + turn
            x = rows(seed, 1 + seed % 5 + 40 * (seed % 17 == 0))
            names = [(PLAIN_NAME,), (ORDERED_NAME,), (DENSE_NAME,), (PLAIN_NAME, ORDERED_NAME)]
            chosen = names[seed % 4]
            items = bench.items(x, chosen, client=f"client {number % 3}", priority=seed % 2)
            told = bench.submit(items)
            if seed % 7 == 0:
                await asyncio.sleep(0)
                bench.batcher.cancel(items)
                continue
            for name, outcome in zip(chosen, await told, strict=True):
                check(outcome, x, name)
            answered += 1

    await asyncio.gather(*map(client, range(20)))
    await bench.all_left()
    assert answered > 450
    assert bench.slab.used_bytes == 0
