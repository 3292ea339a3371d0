"""What became of every call: each that was sent has exactly one end, and one that its kind allows.

A call without an end after LOST_SECONDS is lost, which no kind allows.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Set
from enum import Enum
from typing import Any

import grpc

from qlinear_client import CallError

LOST_SECONDS = 120.0
GONE = ("UNAVAILABLE", "CANCELLED")
"""How calls end while the server is away; gRPC cancels those that come in the very moment in which
it stops, which the clients know and send again."""

MOST_PROBLEMS = 20
OK = "OK"

INCIDENT = re.compile(r"cause under ([0-9a-f]{12})$")


BROKEN_OFF = re.compile("Socket closed|reset by peer|Broken pipe")
"""What gRPC says of a connection that ended under a call: no server does that but a killed one."""


class Away(Enum):
    """How a server was away."""

    NEVER = 0
    IN_ORDER = 1
    """It was told to end, and has answered or refused what had come."""
    KILLED = 2


class Ledger:
    """Counts calls and judges their ends.

    Args:
        how_away: told when a call began; says how the server was away since.
    """

    def __init__(self, how_away: Callable[[float], Away]) -> None:
        self._how_away = how_away
        self.sent = 0
        self.answered = 0
        self.failed = 0
        self.ends: Counter[tuple[str, str]] = Counter()
        self.problems: Counter[str] = Counter()
        self.incidents: set[str] = set()
        """That callers were told of; each must stand in the server's log."""

    def problem(self, text: str) -> None:
        """Note something that must not be; the run has failed."""
        if text in self.problems or len(self.problems) < MOST_PROBLEMS:
            self.problems[text] += 1

    async def end_of(self, kind: str, call: Awaitable[Any], allowed: Set[str]) -> tuple[str, Any]:
        """Wait for the end of a call; return its status and, if that is OK, the answer.

        Args:
            kind: which kind of call it is.
            call: raises CallError, AioRpcError or CancelledError if it fails.
            allowed: statuses that it may end with. Wherever OK is allowed, a full queue is, too,
                and UNAVAILABLE is, while the server is away.
        """
        began = asyncio.get_running_loop().time()
        self.begin()
        answer: Any = None
        try:
            async with asyncio.timeout(LOST_SECONDS):
                answer = await call
            code, text, pause = OK, "", None
        except TimeoutError:
            code, text, pause = "lost", f"no end after {LOST_SECONDS:g} s", None
        except CallError as error:
            code, text, pause = error.code.name, error.message, error.retry_after_seconds
        except grpc.aio.AioRpcError as error:
            code, text, pause = error.code().name, error.details() or "", pushback_of(error)
        except asyncio.CancelledError:
            code, text, pause = "CANCELLED", "", None
        self.end(kind, code, text, allowed, began=began, pause=pause)
        return code, answer

    def begin(self) -> None:
        """Note a call that is sent."""
        self.sent += 1

    def end(
        self,
        kind: str,
        code: str,
        text: str,
        allowed: Set[str],
        *,
        began: float,
        pause: float | None = None,
    ) -> None:
        """Note how a call has ended; see `end_of`."""
        self.ends[kind, code] += 1
        self.answered += code == OK
        self.failed += code not in (OK, "lost")
        if code == "RESOURCE_EXHAUSTED" and code not in allowed:
            if not pause:
                self.problem(f"{kind}: {text!r} comes without a pause to keep")
        elif code not in allowed and not self._is_of_the_end(code, text, began):
            self.problem(f"{kind} ended with {code}: {text!r}; expected {sorted(allowed)}")
        if code == "INTERNAL":
            found = INCIDENT.search(text)
            if found is None:
                self.problem(f"{kind}: {text!r} names no incident")
            else:
                self.incidents.add(found[1])

    def _is_of_the_end(self, code: str, text: str, began: float) -> bool:
        """Say whether a call may have ended so because the server has."""
        away = self._how_away(began)
        if code not in GONE or away is Away.NEVER:
            return False
        return away is Away.KILLED or BROKEN_OFF.search(text) is None

    def check_sum(self) -> None:
        """Note a problem unless every call that was sent was answered or failed."""
        if self.sent != self.answered + self.failed:
            self.problem(f"{self.sent} sent, {self.answered} answered, {self.failed} failed")

    def table(self) -> str:
        """Return all ends, one kind a line."""
        kinds: dict[str, list[str]] = {}
        for (kind, code), count in sorted(self.ends.items()):
            kinds.setdefault(kind, []).append(f"{count} {code}")
        return "\n".join(f"  {kind:<11} {', '.join(ends)}" for kind, ends in kinds.items())


def pushback_of(error: grpc.aio.AioRpcError) -> float | None:
    """Return the pause in seconds that a unary call is asked to keep, None if there is none."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-retry-pushback-ms":
            return int(value) / 1000
    return None
