"""Notices batches that do not end: a wedged kernel hangs, it does not fail.

One timer for all batches that run, on the event loop; what blocks the loop itself is for the
liveness probe to notice. Knows no queue and no device.
"""

import asyncio
import itertools
from collections.abc import Callable

__all__ = ["Watchdog"]


class Watchdog:
    """Calls for help once a batch has run for too long.

    Args:
        most_seconds: of one batch; 0 means that any time is right.
        on_wedged: told once, with how long the batch has run.
    """

    def __init__(self, most_seconds: float, on_wedged: Callable[[float], None]) -> None:
        self._most_seconds = most_seconds
        self._on_wedged = on_wedged
        self._numbers = itertools.count()
        self._begun: dict[int, float] = {}  # in order
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> int:
        """Note that a batch runs; return its number."""
        number = next(self._numbers)
        if self._most_seconds:
            loop = asyncio.get_running_loop()
            self._begun[number] = loop.time()
            if self._timer is None:
                self._timer = loop.call_at(loop.time() + self._most_seconds, self._look)
        return number

    def end(self, number: int) -> None:
        """Note that it has ended, in whatever way."""
        self._begun.pop(number, None)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if not self._begun:
            return
        loop = asyncio.get_running_loop()
        oldest = next(iter(self._begun.values()))
        due = oldest + self._most_seconds
        if loop.time() < due:
            self._timer = loop.call_at(due, self._look)
        else:
            self._on_wedged(loop.time() - oldest)
