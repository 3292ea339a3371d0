"""Batches that do not end: noticed in time, told to all, and never mistaken for slow ones."""

import asyncio
from typing import Any

import pytest
from batcher_harness import A, B, check
from virtual_time import VirtualLoop, run_virtually

from qlinear_service.errors import EngineLost, Unavailable
from qlinear_service.watchdog import Watchdog


def test_only_a_batch_that_exceeds_its_time_is_noticed() -> None:
    loop = VirtualLoop()

    async def main() -> list[float]:
        told: list[float] = []
        dog = Watchdog(10.0, told.append)
        for _ in range(100):  # 800 s of batches of 8 s, some of them overlapping
            number = dog.begin()
            await asyncio.sleep(4)
            other = dog.begin()
            await asyncio.sleep(4)
            dog.end(number)
            await asyncio.sleep(0)
            dog.end(other)
        assert told == []
        await asyncio.sleep(50)
        dog.begin()
        await asyncio.sleep(9.9)
        assert told == []
        await asyncio.sleep(0.2)
        dog.stop()
        return told

    assert run_virtually(main(), loop) == [pytest.approx(10.0)]


def test_no_limit_means_no_timer() -> None:
    loop = VirtualLoop()

    async def main() -> None:
        dog = Watchdog(0.0, lambda seconds: pytest.fail("called"))
        dog.begin()
        await asyncio.sleep(1e5)

    run_virtually(main(), loop)


async def test_a_wedged_batch_ends_the_loop_and_every_call(make: Any) -> None:
    harness = make(most_batch_seconds=0.05)
    harness.gate.clear()
    running = harness.submit(harness.item())
    await harness.entered.wait()
    waiting = harness.submit(harness.item(B), harness.item(A))
    with pytest.raises(EngineLost, match="does not end"):
        await harness.task
    for call in (running, waiting):
        with pytest.raises(Unavailable, match="lost its device"):
            await call
    # The batch may still run: its slot is not released, those of what waited are.
    assert harness.released == [2, 3]
    harness.ended_by_itself(held=1)


async def test_slow_is_not_wedged(make: Any) -> None:
    harness = make(most_batch_seconds=5.0)
    busy = await harness.hold()
    await asyncio.sleep(0.05)
    item = harness.item()
    future = harness.submit(item)
    harness.gate.set()
    await busy
    check(item, (await future)[0])


async def test_an_idle_engine_waits_for_more_where_that_is_asked_for(make: Any) -> None:
    """Calls come 20 µs apart on a clock that each look moves on: batches of many, not of one."""
    harness = make(batch=8, max_wait=200e-6)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1e-6
        return now

    harness.clock = clock
    futures = []
    for _ in range(64):
        futures.append(harness.submit(harness.item()))
        until = now + 20e-6
        while now < until:
            await asyncio.sleep(0)
            clock()
    await asyncio.gather(*futures)
    assert len(harness.batches) < 30
    # Far apart, nobody waits: the rule sees that no second one would come.
    count = len(harness.batches)
    for _ in range(5):
        now += 1.0
        await harness.submit(harness.item())
    assert [len(batch) for batch in harness.batches[count:]] == [1] * 5


async def test_without_being_asked_nobody_waits(make: Any) -> None:
    harness = make(batch=8)
    for number in range(1, 20):
        await harness.submit(harness.item())
        assert len(harness.batches) == number
