"""The life of the server in one place: its phase, and how many calls are in.

Interceptors ask it whether a call may enter and tell it when the call has left; the server moves
the phase and waits for the last one. Event loop only; knows no grpc.
"""

import asyncio
from enum import Enum

from qlinear_service.errors import Unavailable

__all__ = ["Lifecycle", "Phase"]


class Phase(Enum):
    """Where the server is; calls enter while it is SERVING only."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


_REFUSALS = {
    Phase.STARTING: "the server is starting and loads its models; send the call again later",
    Phase.DRAINING: "the server is shutting down; send the call to another one, or again later",
}


class Lifecycle:
    """Phase and in-flight counter, with one owner: the server."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def calls(self) -> int:
        """Calls that have entered and not left."""
        return self._calls

    def enter(self) -> None:
        """Let a call in; the caller owes one `leave`.

        Raises:
            Unavailable: the server is starting or draining.
        """
        if self.phase is not Phase.SERVING:
            raise Unavailable(_REFUSALS[self.phase])
        self._calls += 1
        self._idle.clear()

    def leave(self) -> None:
        """A call that entered has left."""
        self._calls -= 1
        if self._calls == 0:
            self._idle.set()

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until no call is in; return False if that takes longer than `timeout_seconds`."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True
