"""What the batcher does when all is well: who shares a batch, who waits, who gets what."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from batcher_harness import A, B, check

from qlinear_service.batching import Batch
from qlinear_service.errors import Overloaded, Unavailable
from qlinear_service.results import BatchResult


async def test_what_arrives_while_the_engine_is_busy_is_one_batch(make: Any) -> None:
    harness = make()
    busy = await harness.hold()
    items = [harness.item(rows=rows) for rows in (1, 2, 3)]
    futures = [harness.submit(item) for item in items]
    harness.gate.set()
    await busy
    for item, future in zip(items, futures, strict=True):
        (outcome,) = await future
        check(item, outcome)
        assert outcome.batch_rows == 6
        assert outcome.kernel_nanoseconds == 1000
        assert outcome.queue_nanoseconds > 0
    assert harness.batches == [[(1, 0, 1)], [(2, 0, 1), (3, 0, 2), (4, 0, 3)]]
    assert sorted(harness.released) == [1, 2, 3, 4]


async def test_a_free_engine_waits_for_nobody(make: Any) -> None:
    harness = make()
    for number in range(1, 4):
        await harness.submit(harness.item())
        assert len(harness.batches) == number


async def test_what_comes_after_the_clock_was_read_has_not_waited(make: Any) -> None:
    harness = make()
    item = harness.item()
    (outcome,) = await harness.submit(replace(item, enqueued_at=item.enqueued_at + 60))
    check(item, outcome)
    assert outcome.queue_nanoseconds == 0


async def test_one_batch_runs_at_a_time(make: Any) -> None:
    harness = make()
    running = 0

    async def run_batch(batch: Batch) -> BatchResult:
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(0)
        running -= 1
        return BatchResult([memoryview(b"")] * len(batch.parts), 0)

    harness.batcher._run_batch = run_batch
    await asyncio.gather(*(harness.submit(harness.item(key)) for key in (A, B) * 5))


async def test_a_huge_item_is_cut_and_joined_in_order(make: Any) -> None:
    harness = make(batch=8)
    busy = await harness.hold()
    huge, small = harness.item(rows=20), harness.item(rows=2)
    futures = [harness.submit(huge), harness.submit(small)]
    harness.gate.set()
    await busy
    (outcome,), (other,) = await asyncio.gather(*futures)
    check(huge, outcome)
    check(small, other)
    assert len(outcome.pieces) == 3
    assert outcome.kernel_nanoseconds == 3000
    assert harness.batches[1:] == [[(2, 0, 8)], [(3, 0, 2), (2, 8, 6)], [(2, 14, 6)]]


async def test_a_call_of_several_items_succeeds_in_order(make: Any) -> None:
    harness = make()
    items = [harness.item(B, rows=2), harness.item(A, rows=2), harness.item(B, rows=2)]
    outcomes = await harness.submit(*items)
    for item, outcome in zip(items, outcomes, strict=True):
        check(item, outcome)


async def test_a_full_queue_refuses_and_queues_nothing(make: Any) -> None:
    harness = make(rows=4)
    busy = await harness.hold()
    fits = harness.submit(harness.item(rows=3))
    with pytest.raises(Overloaded):
        harness.submit(harness.item(rows=1), harness.item(rows=1))
    harness.gate.set()
    await asyncio.gather(busy, fits)
    assert sum(len(batch) for batch in harness.batches) == 2


async def test_the_end_tells_everybody_and_frees_what_never_ran(make: Any) -> None:
    harness = make()
    busy = await harness.hold()
    waiting = harness.item()
    future = harness.submit(waiting)
    harness.batcher.fail_all(Unavailable("over"))
    for ended in (busy, future):
        with pytest.raises(Unavailable, match="over"):
            await ended
    assert harness.released == [waiting.sequence]
    harness.gate.set()
    await harness.submit(harness.item())


async def test_many_callers_that_come_and_go_are_never_mixed_up(make: Any) -> None:
    harness = make(batch=16, rows=10_000)

    async def caller(number: int) -> None:
        item = harness.item((A, B)[number % 2], rows=number % 40 + 1)
        future = harness.submit(item)
        if number % 5 == 0:
            await asyncio.sleep(0)
            harness.leave([item], future)
        else:
            check(item, (await future)[0])

    async def wave(numbers: Sequence[int]) -> None:
        await asyncio.gather(*map(caller, numbers))

    await asyncio.gather(*(wave(range(start, start + 25)) for start in range(0, 200, 25)))
    await harness.submit(harness.item())
    assert max(sum(part[2] for part in batch) for batch in harness.batches) <= 16


async def arrive_turn_by_turn(harness: Any, calls: int) -> None:
    """Submit one call in each turn of the loop, and wait for all."""
    futures: list[asyncio.Future[Any]] = []
    loop = asyncio.get_running_loop()

    def arrive() -> None:
        futures.append(harness.submit(harness.item()))
        if len(futures) < calls:
            loop.call_soon(arrive)

    arrive()
    while len(futures) < calls:
        await asyncio.sleep(0)
    await asyncio.gather(*futures)


async def test_what_has_reached_the_process_joins_the_batch_that_is_taken_next(make: Any) -> None:
    """A burst whose calls need a few turns of the loop each runs as one batch, not as many."""
    harness = make(batch=100)
    await arrive_turn_by_turn(harness, 21)
    assert [len(batch) for batch in harness.batches] == [21]


async def test_a_full_batch_does_not_wait_for_more(make: Any) -> None:
    harness = make(batch=4)
    await arrive_turn_by_turn(harness, 12)
    assert [len(batch) for batch in harness.batches] == [4, 4, 4]
