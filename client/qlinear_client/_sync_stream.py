"""One open stream of the blocking client: a `StreamCore`, gRPC's sending thread and a reading one.

Its asyncio twin is `_async_stream.py`. A blocking call and a thread are simpler here than an event
loop in a thread, and safer: two event loops in one process disturb each other's grpc.aio.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from qlinear.v1 import linear_pb2 as pb
from qlinear_client._core import Deadline
from qlinear_client._errors import Cancelled
from qlinear_client._stream_core import Settled, StreamCore

__all__ = ["SyncStream"]


class _Waiter:
    """Where one thread waits for one outcome. A bare lock: an Event costs several times as much."""

    __slots__ = ("_latch", "_outcome")

    def __init__(self) -> None:
        self._latch = threading.Lock()
        self._latch.acquire()
        self._outcome: pb.MatMulResponse | Exception | None = None

    def give(self, outcome: pb.MatMulResponse | Exception) -> None:
        """Let the thread go on; once only."""
        self._outcome = outcome
        self._latch.release()

    def wait(self, deadline: Deadline) -> pb.MatMulResponse:
        """Return the answer, or raise what came instead of it."""
        left = deadline.remaining_seconds()
        longest = -1 if left is None else min(left, threading.TIMEOUT_MAX)
        if not self._latch.acquire(timeout=longest):
            raise deadline.missed()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None, "the latch opens when there is an outcome"
        return self._outcome


class SyncStream:
    """Carries calls of many threads.

    Args:
        method: opens a MatMulStream for an iterator of requests.
    """

    def __init__(self, method: Callable[[Iterator[pb.StreamRequest]], Any]) -> None:
        # Reentrant: the garbage collector may close an unclosed client's streams at any moment,
        # also while this very thread holds the lock.
        self._lock = threading.RLock()
        self._core: StreamCore[_Waiter] = StreamCore()
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: send no more
        self._finishing = False
        self.method = method
        """What opened it."""
        self._call = method(self._requests())
        # Daemon: a stream that nobody closed must not keep the interpreter from leaving.
        threading.Thread(target=self._read, name="qlinear stream reader", daemon=True).start()

    @property
    def is_open(self) -> bool:
        """Whether new calls may be sent here."""
        return self._core.is_open and not self._finishing

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self._core.has_ended

    def call(self, message: pb.StreamRequest, deadline: Deadline) -> pb.MatMulResponse:
        """Send one call and return its answer.

        Raises:
            CallError: it failed, or its stream did.
            SendAlone: it is to be sent as a unary call.
        """
        waiter = _Waiter()
        left = deadline.remaining_seconds()
        with self._lock:
            request_id = self._core.enter(message, waiter, timeout_seconds=left)
        self._wakes.put(True)
        try:
            return waiter.wait(deadline)
        finally:
            with self._lock:
                taken_back = self._core.forget(request_id)
            if taken_back:  # time was up, or the thread was interrupted
                self._wakes.put(True)

    def finish(self) -> None:
        """Send no more calls; the stream ends once those that are out are answered."""
        self._finishing = True
        self._wakes.put(True)

    def close(self) -> None:
        """End at once; calls that still wait end with `Cancelled`."""
        with self._lock:
            waiters = self._core.close()
        for waiter in waiters:
            waiter.give(Cancelled("the client was closed while the call waited"))
        self._wakes.put(False)
        self._call.cancel()

    def _requests(self) -> Iterator[pb.StreamRequest]:
        """Yield what is to be sent; runs on gRPC's thread."""
        while self._wakes.get():
            with self._lock:
                message = self._core.next_message()
                finished = message is None and self._finishing and not len(self._core)
            if message is not None:
                yield message
            elif finished:
                return

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for response in self._call:
                with self._lock:
                    settled = self._core.on_message(response)
                self._give(settled)
        code, details = self._call.code(), self._call.details() or ""
        with self._lock:
            settled = self._core.on_end(code, details)
        self._give(settled)
        self._wakes.put(False)

    def _give(self, settled: Settled[_Waiter]) -> None:
        for waiter, outcome in settled:
            waiter.give(outcome)
        if self._finishing:
            self._wakes.put(True)
