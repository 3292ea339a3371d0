"""One stream of many calls without its connection: ids, what waits, what each message means.

The shells own the connection and the waiting: they send what `next_message` gives, and tell
`on_message` and `on_end` what arrives. Both return who is to be given what. Not locked: a shell
with threads calls it under a lock of its own.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeAlias, TypeVar

import grpc

from qlinear.v1 import linear_pb2 as pb
from qlinear_client._errors import Internal, Unavailable, error_class
from qlinear_client._retries import Moved, SendAlone
from qlinear_client._targets import plain_words

__all__ = ["Settled", "StreamCore"]

W = TypeVar("W")

Settled: TypeAlias = list[tuple[W, pb.MatMulResponse | Exception]]
"""Waiters and what each is to be given: the answer, or what to raise."""

CODES = {code.value[0]: code for code in grpc.StatusCode}

MAX_TIMEOUT_NANOSECONDS = (1 << 64) - 1

BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""How a stream ends whose server or network is gone; CANCELLED comes from servers that stop."""


class StreamCore(Generic[W]):
    """The calls of one stream.

    A waiter is whatever the shell wants to get back when the call has ended.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._waiters: dict[int, W] = {}
        self._outgoing: deque[pb.StreamRequest] = deque()
        self._expiries: list[tuple[float, int]] = []  # heap; calls that have ended are skipped
        self.is_leaving = False
        """The server wants no more calls here."""
        self.has_ended = False
        self._end = grpc.StatusCode.OK, ""

    @property
    def is_open(self) -> bool:
        """Whether new calls may enter."""
        return not self.is_leaving and not self.has_ended

    def __len__(self) -> int:
        return len(self._waiters)

    def enter(
        self,
        message: pb.StreamRequest,
        waiter: W,
        *,
        timeout_seconds: float | None,
        expires_at: float | None = None,
    ) -> int:
        """Take a call and return its id.

        Args:
            message: holds the call; id and timeout are set here.
            waiter: given back when it has ended.
            timeout_seconds: for the server; None = no deadline.
            expires_at: for `expire`; None = never.

        Raises:
            Exception: the stream takes no more calls, as `on_end` would say it.
        """
        if not self.is_open:
            raise self._end_of(*self._end)
        request_id = next(self._ids)
        message.request_id = request_id
        message.timeout_nanoseconds = 0
        if timeout_seconds is not None:
            nanoseconds = max(1, int(timeout_seconds * 1e9))  # 0 would mean no deadline
            message.timeout_nanoseconds = min(nanoseconds, MAX_TIMEOUT_NANOSECONDS)
        self._waiters[request_id] = waiter
        self._outgoing.append(message)
        if expires_at is not None:
            heapq.heappush(self._expiries, (expires_at, request_id))
        return request_id

    def forget(self, request_id: int) -> bool:
        """Take a call back, as its waiter is gone; return whether it still had no answer."""
        if self._waiters.pop(request_id, None) is None:
            return False
        if not self.has_ended:
            self._outgoing.append(pb.StreamRequest(request_id=request_id, cancel=pb.Cancel()))
        return True

    def next_message(self) -> pb.StreamRequest | None:
        """Return what is to be sent next, None if there is nothing."""
        while self._outgoing:
            message = self._outgoing.popleft()
            if message.HasField("cancel") or message.request_id in self._waiters:
                return message
        return None

    def on_message(self, response: pb.StreamResponse) -> Settled[W]:
        """Take what the server sent."""
        outcome = response.WhichOneof("outcome")
        if outcome == "going_away":
            self.is_leaving = True
            return list(self._move_unsent())
        waiter = self._waiters.pop(response.request_id, None)
        if waiter is None:
            return []  # taken back or too late meanwhile
        if outcome == "result":
            return [(waiter, response.result)]
        if outcome == "error":
            return [(waiter, self._error_of(response.error))]
        return [(waiter, Internal("the server's answer has no outcome that this client knows"))]

    def on_end(self, code: grpc.StatusCode, details: str) -> Settled[W]:
        """Take the end of the stream: nothing more is sent or received."""
        self._end = code, details
        return [(waiter, self._end_of(code, details)) for waiter in self.close()]

    def close(self) -> list[W]:
        """End the stream from this side and return whoever still waits."""
        self.has_ended = True
        self._outgoing.clear()
        waiters = list(self._waiters.values())
        self._waiters.clear()
        return waiters

    def next_expiry(self) -> float | None:
        """Return when `expire` next has something to do, None if never."""
        while self._expiries and self._expiries[0][1] not in self._waiters:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def expire(self, now: float) -> Iterator[W]:
        """Yield the waiters whose time is up; the server drops their calls by itself."""
        while (expiry := self.next_expiry()) is not None and expiry <= now:
            yield self._waiters.pop(heapq.heappop(self._expiries)[1])

    def _move_unsent(self) -> Iterable[tuple[W, Exception]]:
        for message in self._outgoing:
            waiter = self._waiters.pop(message.request_id, None)
            if waiter is not None:
                yield waiter, Moved("the server goes away and has not seen the call")
        self._outgoing.clear()

    def _error_of(self, error: pb.Error) -> Exception:
        code = CODES.get(error.code, grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK:
            return Internal("the server answered with an error whose code is OK")
        if code is grpc.StatusCode.UNAVAILABLE and self.is_leaving:
            return Moved(error.message)
        pause = error.retry_after_nanoseconds
        return error_class(code)(
            error.message or f"the call ended with {code.name} and no explanation",
            code=code,
            retryable=pause > 0 or code is grpc.StatusCode.UNAVAILABLE,
            retry_after_seconds=pause / 1e9 if pause else None,
        )

    def _end_of(self, code: grpc.StatusCode, details: str) -> Exception:
        if self.is_leaving or code is grpc.StatusCode.OK:
            return Moved("the stream ended before the answer came")
        if code in BROKEN:
            return Unavailable(plain_words(details) or "the stream broke", retryable=True)
        # INTERNAL may stand for any other status: grpc.aio says so when a write failed before the
        # status had arrived.
        return SendAlone(code)
