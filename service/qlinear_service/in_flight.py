"""Batches that are with the engine at the same time, each served by a task of its own.

For engines that copy one batch while they compute another. Knows no queue and no batch.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["InFlight"]


class InFlight:
    """At most so many tasks; what ends one of them with an error ends all.

    Args:
        most: tasks at a time.
        on_fault: called when one has ended with an error, which `room` raises from then on.
    """

    def __init__(self, most: int, on_fault: Callable[[], None]) -> None:
        self.most = most
        self._on_fault = on_fault
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._fault: BaseException | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    async def room(self) -> None:
        """Wait until one more may start; raise the error of one that has failed."""
        while self._fault is None and len(self._tasks) >= self.most:
            self._ended.clear()
            await self._ended.wait()
        if self._fault is not None:
            raise self._fault

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the others."""
        task = asyncio.create_task(work, name="batch")
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    async def cancel(self) -> None:
        """Cancel all of them and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()
            self._on_fault()
        self._ended.set()
