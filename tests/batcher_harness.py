"""A batcher on a real event loop with an engine of the test's making.

No sleeps: the fake engine is a gate that the test opens.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from measured_layers import Spec, metrics_of

from qlinear_service.batcher import Batcher
from qlinear_service.batching import Batch, BatchKey, WorkItem, WorkQueue
from qlinear_service.dtypes import DType
from qlinear_service.results import Answer, BatchResult, Outcome
from qlinear_service.slots import Slot

A = BatchKey("m/a", DType.F16, DType.F16)
B = BatchKey("m/b", DType.F16, DType.F16)


class Harness:
    """A batcher whose engine answers each row with (sequence, row) and can be held and broken."""

    def __init__(
        self,
        *,
        batch: int = 8,
        rows: int = 1000,
        age: float = 60.0,
        max_wait: float = 0.0,
        most_batch_seconds: float = 0.0,
    ) -> None:
        self.held_at_the_end: int | None = None
        """Items of a batch that was given up, where the loop ended by itself."""
        self.batches: list[list[tuple[int, int, int]]] = []
        self.released: list[int] = []
        self.poisoned: set[int] = set()
        # Calls, by their first items.
        self.gone: set[int] = set()
        self.told: list[int] = []
        self.told_though_gone: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.on_batch: Callable[[Batch], None] = lambda batch: None
        self.numbers = itertools.count(1)
        self.clock = asyncio.get_running_loop().time
        self.metrics = metrics_of(Spec("a", n=8), Spec("b", n=8))
        queue = WorkQueue(
            max_batch_rows=batch,
            max_queue_rows=rows,
            max_age_seconds=age,
            max_wait_seconds=max_wait,
        )
        self.batcher = Batcher(
            queue=queue,
            run_batch=self.run_batch,
            release=lambda item: self.released.append(item.sequence),
            clock=lambda: self.clock(),
            metrics=self.metrics,
            most_batch_seconds=most_batch_seconds,
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
        future: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()

        def settle(answer: Answer) -> None:
            self.told.append(items[0].sequence)
            if items[0].sequence in self.gone:
                self.told_though_gone.append(items[0].sequence)
            elif isinstance(answer, list):
                future.set_result(answer)
            else:
                future.set_exception(answer)

        self.batcher.submit(items, settle)
        return future

    def leave(self, items: Sequence[WorkItem], future: asyncio.Future[list[Outcome]]) -> None:
        """Let the caller of a call go away."""
        future.cancel()
        self.gone.add(items[0].sequence)
        self.batcher.cancel(items)

    def ended_by_itself(self, *, held: int) -> None:
        """Note that the loop has ended, with so many items in a batch that was given up."""
        self.held_at_the_end = held

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
