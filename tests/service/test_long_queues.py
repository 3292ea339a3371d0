"""Queues that do not become empty for long: who gets a turn, and what is remembered."""

import itertools
import tracemalloc

from qlinear_service.batching import BatchKey, WorkItem, WorkQueue
from qlinear_service.dtypes import DType
from qlinear_service.slots import Slot

A = BatchKey("m/a", DType.F16, DType.F16)
B = BatchKey("m/b", DType.F16, DType.F16)
counter = itertools.count(1)


def item(key: BatchKey = A, rows: int = 1, at: float = 0.0, priority: int = 0) -> WorkItem:
    return WorkItem(
        sequence=next(counter),
        key=key,
        rows=rows,
        slot=Slot(0, 0),
        nbytes=rows,
        enqueued_at=at,
        priority=priority,
    )


def make_queue() -> WorkQueue:
    return WorkQueue(max_batch_rows=8, max_queue_rows=10_000, max_age_seconds=5.0)


def test_a_large_call_does_not_take_the_turns_of_those_that_have_waited_long() -> None:
    """Urgent calls never end and the large one came first; the small one waits for half the age."""
    queue = make_queue()
    large, small = item(rows=4000, priority=1), item(B)
    queue.admit([large, small])
    for number in range(400):
        now = number * 0.01
        if number % 2:
            queue.admit([item(priority=2, rows=8, at=now)])
        queue.take(now)
        if small not in queue:
            break
    assert 2.5 < now < 2.6
    assert large in queue


def test_places_that_nobody_asks_for_take_no_memory() -> None:
    """For a moment two layers wait, then calls for one come as fast as they are served."""
    queue = make_queue()
    queue.admit([item(B), *(item(at=0.0) for _ in range(20))])
    tracemalloc.start()
    try:
        for number in range(1, 3001):
            queue.expire(number * 1e-3)
            queue.take(number * 1e-3)
            queue.admit([item(at=number * 1e-3) for _ in range(20 - min(queue.rows, 20))])
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert queue.rows == 20
    assert used < 200_000
