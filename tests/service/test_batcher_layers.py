"""Calls of several layers: one end for all of their items, however and whenever it comes."""

import asyncio
import itertools
import random
from typing import Any

import pytest
from batcher_harness import A, B, Harness, check

from qlinear_service.batching import WorkItem
from qlinear_service.errors import DeadlineExceeded, Overloaded


@pytest.mark.parametrize("by_timer", [True, False])
@pytest.mark.parametrize("error", [DeadlineExceeded, Overloaded])
async def test_calls_that_expire_together_all_end(
    make: Any, by_timer: bool, error: type[Exception]
) -> None:
    """Siblings of one call and other calls, dropped in one go: by the timer, and before a batch."""
    harness: Harness = make(age=0.03 if error is Overloaded else 60.0)
    held = await harness.hold()
    end = None if error is Overloaded else harness.clock() + 0.03
    items = [[harness.item(key, deadline=end) for key in (A, B, A)] for _ in range(3)]
    futures = [harness.submit(*call) for call in items]
    alone = harness.submit(harness.item(B, deadline=end))
    if not by_timer:
        assert harness.batcher._timer is not None
        harness.batcher._timer.cancel()
        later = asyncio.get_running_loop().call_later(0.05, harness.gate.set)
    for future in (*futures, alone):
        with pytest.raises(error):
            await asyncio.wait_for(future, 5)
    if not by_timer:
        later.cancel()
    harness.gate.set()
    await held
    fresh = harness.item()
    check(fresh, (await asyncio.wait_for(harness.submit(fresh), 5))[0])
    assert harness.batcher.items_held == 0
    assert sorted(harness.released) == sorted({*harness.released})
    assert len(harness.released) == 1 + 9 + 1 + 1


async def test_many_calls_of_several_layers_that_come_and_go(make: Any) -> None:
    """Random deadlines, cancels and poison; every future ends and every slot comes back once."""
    harness: Harness = make(batch=16, age=0.05)
    draw = random.Random(7)
    calls: list[tuple[list[WorkItem], asyncio.Future[Any]]] = []
    for number in range(400):
        end = harness.clock() + draw.choice([0.0005, 0.003, 60.0])
        keys = [draw.choice([A, B]) for _ in range(draw.randint(1, 4))]
        items = [harness.item(key, draw.randint(1, 20), deadline=end) for key in keys]
        if draw.random() < 0.05:
            harness.poisoned.add(items[0].sequence)
        calls.append((items, harness.submit(*items)))
        if draw.random() < 0.1:
            victim_items, victim = draw.choice(calls)
            harness.leave(victim_items, victim)
        if number % 10 == 0:
            await asyncio.sleep(0)
    ends = await asyncio.wait_for(
        asyncio.gather(*(future for _, future in calls), return_exceptions=True), 20
    )
    answered = 0
    for (items, _), end_ in zip(calls, ends, strict=True):
        if isinstance(end_, list):
            answered += 1
            for item, outcome in zip(items, end_, strict=True):
                check(item, outcome)
    assert 0 < answered < 400
    while harness.batcher.items_held:
        await asyncio.sleep(0)
    expected = itertools.chain.from_iterable(items for items, _ in calls)
    assert sorted(harness.released) == sorted(item.sequence for item in expected)
    assert not harness.task.done()
