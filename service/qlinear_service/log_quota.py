"""How many lines of one kind a log gets: whoever can cause a line could fill a disk with them.

Takes its clock as an argument; for one thread.
"""

import time
from collections.abc import Callable

__all__ = ["LogQuota"]


class LogQuota:
    """Lets some lines of each period through and counts the others.

    Args:
        most: lines of one period.
        seconds: of a period.
        clock: seconds; does not go back.
    """

    def __init__(
        self, most: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._began = -seconds
        self._asked = 0
        self._left_out = 0

    def ask(self) -> int | None:
        """Return how many lines were left out before this one; None: it is to be left out, too."""
        now = self._clock()
        if now - self._began >= self._seconds:
            self._began, self._asked = now, 0
        self._asked += 1
        if self._asked > self._most:
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        return left_out
