"""An event loop whose clock stands still while code runs and jumps to the next timer.

Hours of schedule pass in milliseconds, and always in the same way.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for a timer, moves the clock to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is scheduled: the code under test hangs"
        self.now += max(timeout, 0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 seconds."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def pass_time(self, seconds: float) -> None:
        """Do as if code had run for so long without giving way."""
        self._jumping.now += seconds


def run_virtually(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Run `main` to its end."""
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
