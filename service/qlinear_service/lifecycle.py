"""The life of the server in one place: its phase, and how many calls are in.

Handlers ask it whether a call may enter and tell it when the call has left; the server moves
the phase and waits for the last one. Event loop only; knows no grpc.
"""

import asyncio
from collections.abc import Callable
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
        self.arrived = 0
        """Calls that have ever entered."""
        self._calls = 0
        self._none = asyncio.Event()
        self._none.set()

    def __int__(self) -> int:
        return self._calls

    def enter(self) -> None:
        """One more."""
        self.arrived += 1
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
        self._drain_watchers: set[Callable[[], None]] = set()
        self.admitted = CallCount()
        """Calls that are answered."""
        self.refused = CallCount()
        """Calls that are being told that they came at the wrong time."""

    @property
    def counting(self) -> CallCount:
        """Where a call that arrives now is to be counted."""
        return self.admitted if self.phase is Phase.SERVING else self.refused

    async def wait_quiet(self, quiet_seconds: float, *, at_most_seconds: float) -> None:
        """Wait until no call has come for `quiet_seconds`; at most `at_most_seconds`."""
        for _ in range(round(at_most_seconds / quiet_seconds)):
            arrived = self.refused.arrived
            await asyncio.sleep(quiet_seconds)
            if self.refused.arrived == arrived:
                return

    def begin_drain(self) -> None:
        """Let no more calls enter, and tell those who keep a stream open."""
        self.phase = Phase.DRAINING
        for tell in list(self._drain_watchers):
            tell()

    def watch_drain(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when the drain begins."""
        self._drain_watchers.add(tell)

    def unwatch_drain(self, tell: Callable[[], None]) -> None:
        """Take `tell` back."""
        self._drain_watchers.discard(tell)

    def check(self) -> None:
        """Raise Unavailable unless calls may enter now."""
        if self.phase is not Phase.SERVING:
            raise Unavailable(_REFUSALS[self.phase])
