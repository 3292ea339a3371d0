"""When a failed attempt is followed by another: pure, apart from the drawing of random numbers.

A call is sent again only where that can help: the server says so, or no server has answered. The
shells wait; this module says how long. Nothing is ever sent after a call's deadline.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from qlinear_client._errors import CallError, Unavailable

if TYPE_CHECKING:
    from qlinear_client._core import Deadline

__all__ = ["Moved", "Retries", "SendAlone"]

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
"""Between attempts of which the server did not say when: doubling from the first to the longest."""


class Moved(Unavailable):
    """The stream has ended, as a draining server's do, without an answer to this call.

    Never shown to callers: the call is sent on the next stream.
    """


class SendAlone(Exception):
    """The stream ended because of one of its calls, or servers here have none: use unary calls.

    Then each call is told what is wrong with itself, and none suffers from another.
    """

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code)
        self.code = code


class Retries:
    """The attempts of one call.

    Args:
        max_retries: attempts after the first; moves to another stream do not count.
        draw: a number from 0 to 1.
    """

    __slots__ = ("_draw", "_failures", "_max_retries", "_moves")

    def __init__(self, max_retries: int, draw: Callable[[], float] = random.random) -> None:
        self._max_retries = max_retries
        self._draw = draw
        self._failures = 0
        self._moves = 0

    def pause_seconds(self, error: CallError, deadline: "Deadline") -> float:
        """Return how long to wait before the call is sent again.

        Raises:
            CallError: `error`, as another attempt would not help, is not wanted or comes too late.
        """
        if isinstance(error, Moved):
            pause = self._backoff(self._moves) if self._moves else 0.0
            self._moves += 1
            error = Unavailable(error.message, retryable=True)
        elif not error.retryable or self._failures >= self._max_retries:
            raise error
        else:
            pause = self._pause_after(error)
            self._failures += 1
        left = deadline.remaining_seconds()
        if left is not None and pause >= left:
            raise error
        return pause

    def _pause_after(self, error: CallError) -> float:
        asked = error.retry_after_seconds
        if asked is None:
            return self._backoff(self._failures)
        # Never earlier than the server asks, and not all clients at once.
        return asked * (1 + self._draw() / 2)

    def _backoff(self, attempts: int) -> float:
        longest = min(FIRST_PAUSE_SECONDS * 2.0**attempts, LONGEST_PAUSE_SECONDS)
        return longest * (1 + self._draw()) / 2
