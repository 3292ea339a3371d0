"""The life of the server in one place: its phase, and how many calls are in.

Interceptors ask it whether a call may enter and tell it when the call has left; the server moves
the phase and waits for the last one. Event loop only; knows no grpc.
"""

import asyncio
from enum import Enum

from qlinear_service.errors import Unavailable

__all__ = ["CallCount", "Lifecycle", "Phase"]


class Phase(Enum):
    """Where the server is; calls enter while it is SERVING only."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


_REFUSALS = {
    Phase.STARTING: "the server is starting and loads its models; send the call again later",
    Phase.DRAINING: "the server is shutting down; send the call to another one, or again later",
}


class CallCount:
    """Calls of one kind that are in."""

    def __init__(self) -> None:
        self._calls = 0
        self._none = asyncio.Event()
        self._none.set()

    def __int__(self) -> int:
        return self._calls

    def enter(self) -> None:
        """One more."""
        self._calls += 1
        self._none.clear()

    def leave(self) -> None:
        """One less."""
        self._calls -= 1
        if self._calls == 0:
            self._none.set()

    async def wait_none(self, timeout_seconds: float) -> bool:
        """Wait until none is in; return False if that takes longer than `timeout_seconds`."""
        if self._none.is_set():
            return True
        try:
            await asyncio.wait_for(self._none.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True


class Lifecycle:
    """Phase and counts, with one owner: the server."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.admitted = CallCount()
        """Calls that are answered."""
        self.refused = CallCount()
        """Calls that are being told that they came at the wrong time."""

    @property
    def counting(self) -> CallCount:
        """Where a call that arrives now is to be counted."""
        return self.admitted if self.phase is Phase.SERVING else self.refused

    def check(self) -> None:
        """Raise Unavailable unless calls may enter now."""
        if self.phase is not Phase.SERVING:
            raise Unavailable(_REFUSALS[self.phase])
