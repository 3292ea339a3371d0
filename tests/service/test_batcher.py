"""The batcher on a real event loop with an engine of the test's making: nobody is lost or mixed up.

No sleeps: the fake engine is a gate that the test opens.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from qlinear_service.batcher import Batcher, BatchResult, Outcome
from qlinear_service.batching import Batch, BatchKey, WorkItem, WorkQueue
from qlinear_service.dtypes import DType
from qlinear_service.errors import DeadlineExceeded, EngineFailure, Overloaded, Unavailable
from qlinear_service.slots import Slot

A = BatchKey("m/a", DType.F16, DType.F16)
B = BatchKey("m/b", DType.F16, DType.F16)


class Harness:
    """A batcher whose engine answers each row with (sequence, row) and can be held and broken."""

    def __init__(self, *, batch: int = 8, rows: int = 1000, age: float = 60.0) -> None:
        self.batches: list[list[tuple[int, int, int]]] = []
        self.released: list[int] = []
        self.poisoned: set[int] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.on_batch: Callable[[Batch], None] = lambda batch: None
        self.numbers = itertools.count(1)
        self.clock = asyncio.get_running_loop().time
        queue = WorkQueue(max_batch_rows=batch, max_queue_rows=rows, max_age_seconds=age)
        self.batcher = Batcher(
            queue=queue,
            run_batch=self.run_batch,
            release=lambda item: self.released.append(item.sequence),
            clock=lambda: self.clock(),
        )
        self.task = asyncio.create_task(self.batcher.run())

    async def run_batch(self, batch: Batch) -> BatchResult:
        self.batches.append([(p.item.sequence, p.start, p.rows) for p in batch.parts])
        self.entered.set()
        await self.gate.wait()
        self.on_batch(batch)
        if self.poisoned & {part.item.sequence for part in batch.parts}:
            raise ValueError("poison")
        rows = [
            memoryview(bytes([p.item.sequence % 256, row]) * 1)
            for p in batch.parts
            for row in range(p.start, p.start + p.rows)
        ]
        joined = iter(rows)
        return BatchResult(
            [memoryview(b"".join(itertools.islice(joined, p.rows))) for p in batch.parts], 1000
        )

    def item(self, key: BatchKey = A, rows: int = 1, **more: Any) -> WorkItem:
        return WorkItem(
            sequence=next(self.numbers),
            key=key,
            rows=rows,
            slot=Slot(0, 0),
            nbytes=rows,
            enqueued_at=self.clock(),
            **more,
        )

    def submit(self, *items: WorkItem) -> asyncio.Future[list[Outcome]]:
        return self.batcher.submit(items)

    async def hold(self) -> asyncio.Future[list[Outcome]]:
        """Keep the engine busy with one item until the gate opens."""
        self.gate.clear()
        self.entered.clear()
        future = self.submit(self.item())
        await self.entered.wait()
        return future


def check(item: WorkItem, outcome: Outcome) -> None:
    expected = b"".join(bytes([item.sequence % 256, row]) for row in range(item.rows))
    assert b"".join(outcome.pieces) == expected


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def build(**more: Any) -> Harness:
        made.append(Harness(**more))
        return made[-1]

    yield build
    for harness in made:
        harness.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await harness.task
        assert harness.batcher.items_held == 0, "an item was never released"
        assert len(harness.released) == len(set(harness.released)), "an item was released twice"


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
    assert harness.batches[1:] == [[(2, 0, 8)], [(2, 8, 8)], [(2, 16, 4), (3, 0, 2)]]


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


async def test_a_call_of_several_items_succeeds_in_order(make: Any) -> None:
    harness = make()
    items = [harness.item(B, rows=2), harness.item(A, rows=2), harness.item(B, rows=2)]
    outcomes = await harness.submit(*items)
    for item, outcome in zip(items, outcomes, strict=True):
        check(item, outcome)


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
    future.cancel()
    harness.batcher.cancel([gone])
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
    future.cancel()
    harness.batcher.cancel([huge])
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
            futures[1].cancel()
            harness.batcher.cancel([items[1]])

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
            future.cancel()
            harness.batcher.cancel([item])
        else:
            check(item, (await future)[0])

    async def wave(numbers: Sequence[int]) -> None:
        await asyncio.gather(*map(caller, numbers))

    await asyncio.gather(*(wave(range(start, start + 25)) for start in range(0, 200, 25)))
    await harness.submit(harness.item())
    assert max(sum(part[2] for part in batch) for batch in harness.batches) <= 16
