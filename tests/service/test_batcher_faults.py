"""Failures, cancels and deadlines: they reach their own caller and nobody else."""

import asyncio
import logging
from typing import Any

import pytest
from batcher_harness import A, B, check

from qlinear_service.batching import Batch
from qlinear_service.errors import DeadlineExceeded, EngineFailure, Overloaded
from qlinear_service.results import BatchResult


async def test_a_failing_batch_is_retried_one_by_one(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    harness = make()
    busy = await harness.hold()
    items = [harness.item(rows=2) for _ in range(3)]
    futures = [harness.submit(item) for item in items]
    harness.poisoned = {items[1].sequence}
    harness.gate.set()
    await busy
    first, broken, last = await asyncio.gather(*futures, return_exceptions=True)
    for item, outcome in ((items[0], first), (items[2], last)):
        check(item, outcome[0])
        assert outcome[0].batch_rows == 2
    assert isinstance(broken, EngineFailure)
    assert "poison" not in str(broken)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert broken.incident in errors[0].getMessage()
    assert errors[0].exc_info is not None
    assert "poison" in str(errors[0].exc_info[1])
    # The server lives on.
    await harness.submit(harness.item())


async def test_one_request_alone_is_not_tried_twice(make: Any) -> None:
    harness = make()
    item = harness.item()
    harness.poisoned = {item.sequence}
    with pytest.raises(EngineFailure):
        await harness.submit(item)
    assert len(harness.batches) == 1


async def test_a_piece_that_fails_ends_its_item_and_drops_the_rest(make: Any) -> None:
    harness = make(batch=8)
    huge = harness.item(rows=40)
    harness.poisoned = {huge.sequence}
    with pytest.raises(EngineFailure):
        await harness.submit(huge)
    await harness.submit(harness.item())
    assert harness.batches == [[(1, 0, 8)], [(2, 0, 1)]]


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_wrong_number_of_results_is_a_failure_not_a_mix_up(make: Any, count: int) -> None:
    harness = make()

    async def run_batch(batch: Batch) -> BatchResult:
        return BatchResult([memoryview(b"x")] * count, 0)

    harness.batcher._run_batch = run_batch
    items = [harness.item() for _ in range(2)]
    outcomes = await asyncio.gather(*map(harness.submit, items), return_exceptions=True)
    # Alone each gets `count` results again: right for one, and only for one.
    kinds = [isinstance(outcome, EngineFailure) for outcome in outcomes]
    assert kinds == [count != 1] * 2


async def test_one_failing_item_fails_its_call_and_takes_back_the_others(make: Any) -> None:
    harness = make()
    bad, taken_back = harness.item(A), harness.item(B)
    harness.poisoned = {bad.sequence}
    with pytest.raises(EngineFailure):
        await harness.submit(bad, taken_back)
    await harness.submit(harness.item(B))
    assert harness.batches == [[(1, 0, 1)], [(3, 0, 1)]]


async def test_cancelled_before_it_ran_is_never_computed(make: Any) -> None:
    harness = make()
    busy = await harness.hold()
    gone, stays = harness.item(), harness.item()
    future, other = harness.submit(gone), harness.submit(stays)
    harness.leave([gone], future)
    assert harness.released == [gone.sequence]
    harness.gate.set()
    await busy
    check(stays, (await other)[0])
    assert harness.batches == [[(1, 0, 1)], [(3, 0, 1)]]


async def test_cancelled_while_it_runs_keeps_its_slot_until_the_engine_is_done(make: Any) -> None:
    harness = make(batch=8)
    harness.gate.clear()
    huge, neighbour = harness.item(rows=10), harness.item(rows=6)
    future, other = harness.submit(huge), harness.submit(neighbour)
    await harness.entered.wait()
    harness.leave([huge], future)
    assert harness.released == []
    harness.gate.set()
    check(neighbour, (await other)[0])
    assert set(harness.released) == {huge.sequence, neighbour.sequence}
    assert harness.batches == [[(1, 0, 8)], [(2, 0, 6)]]


async def test_a_caller_that_left_during_a_failing_batch_is_not_retried(make: Any) -> None:
    harness = make()
    busy = await harness.hold()
    items = [harness.item() for _ in range(3)]
    futures = [harness.submit(item) for item in items]
    harness.poisoned = {items[0].sequence}

    def leave(batch: Batch) -> None:
        if len(batch.parts) == 3:
            harness.leave([items[1]], futures[1])

    harness.on_batch = leave
    harness.gate.set()
    await busy
    with pytest.raises(EngineFailure):
        await futures[0]
    check(items[2], (await futures[2])[0])
    assert [[part[0] for part in batch] for batch in harness.batches[1:]] == [[2, 3, 4], [2], [4]]


async def test_a_deadline_ends_the_wait_even_while_the_engine_is_stuck(make: Any) -> None:
    harness = make()
    busy = await harness.hold()
    item = harness.item(deadline=harness.clock() + 0.02)
    with pytest.raises(DeadlineExceeded):
        await harness.submit(item)
    assert not busy.done()
    harness.gate.set()
    await busy
    assert harness.batches == [[(1, 0, 1)]]


async def test_age_ends_the_wait_even_while_the_engine_is_stuck(make: Any) -> None:
    harness = make(age=0.02)
    busy = await harness.hold()
    later = harness.submit(harness.item(deadline=harness.clock() + 60))
    with pytest.raises(Overloaded, match="max_queue_age"):
        await later
    harness.gate.set()
    await busy


async def test_a_deadline_that_passes_during_a_failing_batch_is_kept(make: Any) -> None:
    harness = make()
    busy = await harness.hold()
    start = harness.clock()
    items = [harness.item(), harness.item(deadline=start + 50), harness.item()]
    harness.poisoned = {items[0].sequence}
    futures = [harness.submit(item) for item in items]

    def pass_time(batch: Batch) -> None:
        if len(batch.parts) == 3:
            harness.clock = lambda: start + 51

    harness.on_batch = pass_time
    harness.gate.set()
    await busy
    first, second, third = await asyncio.gather(*futures, return_exceptions=True)
    assert isinstance(first, EngineFailure)
    assert isinstance(second, DeadlineExceeded)
    check(items[2], third[0])
    assert [len(batch) for batch in harness.batches] == [1, 3, 1, 1]


async def test_a_computation_that_is_cancelled_from_inside_is_a_failure_like_any_other(
    make: Any,
) -> None:
    harness = make()

    def cancelled(batch: Batch) -> None:
        raise asyncio.CancelledError

    harness.on_batch = cancelled
    with pytest.raises(EngineFailure):
        await asyncio.wait_for(harness.submit(harness.item()), 5)
    harness.on_batch = lambda batch: None
    item = harness.item()
    check(item, (await asyncio.wait_for(harness.submit(item), 5))[0])
