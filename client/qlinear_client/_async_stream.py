"""One open stream of the asyncio client: two tasks around a `StreamCore`, none for a call.

Its blocking twin is `_sync_stream.py`. A stream belongs to the event loop that opened it.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from qlinear.v1 import linear_pb2 as pb
from qlinear_client._core import Deadline
from qlinear_client._errors import Cancelled
from qlinear_client._stream_core import Settled, StreamCore

__all__ = ["AsyncStream"]

Future = asyncio.Future[pb.MatMulResponse]


class AsyncStream:
    """Carries calls of many tasks.

    Args:
        method: opens a MatMulStream.
    """

    def __init__(self, method: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._core: StreamCore[tuple[Future, Deadline]] = StreamCore()
        self.method = method
        """What opened it."""
        self._call = method()
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._finishing = False
        self._writer = self._loop.create_task(self._write(), name="qlinear stream writer")
        self._reader = self._loop.create_task(self._read(), name="qlinear stream reader")

    @property
    def is_open(self) -> bool:
        """Whether new calls may be sent here."""
        return self._core.is_open and not self._finishing

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self._core.has_ended

    async def call(self, message: pb.StreamRequest, deadline: Deadline) -> pb.MatMulResponse:
        """Send one call and return its answer.

        Raises:
            CallError: it failed, or its stream did.
            SendAlone: it is to be sent as a unary call.
        """
        left = deadline.remaining_seconds()
        expires_at = None if left is None else self._loop.time() + left
        future: Future = self._loop.create_future()
        request_id = self._core.enter(
            message, (future, deadline), timeout_seconds=left, expires_at=expires_at
        )
        self._news.set()
        if expires_at is not None:
            self._set_timer()
        try:
            return await future
        except asyncio.CancelledError:
            self._core.forget(request_id)
            self._news.set()
            raise

    def finish(self) -> None:
        """Send no more calls; the stream ends once those that are out are answered."""
        self._finishing = True
        self._news.set()

    async def close(self) -> None:
        """End at once; calls that still wait end with `Cancelled`."""
        self._abandon()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)

    def close_soon(self) -> None:
        """Do as `close` from any thread, and from the garbage collector."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abandon)

    def _abandon(self) -> None:
        for future, _ in self._core.close():
            if not future.done():
                future.set_exception(Cancelled("the client was closed while the call waited"))
        self._call.cancel()
        self._stop()

    def _stop(self) -> None:
        self._writer.cancel()
        if self._timer is not None:
            self._timer.cancel()

    async def _write(self) -> None:
        try:
            while True:
                self._news.clear()
                while (message := self._core.next_message()) is not None:
                    await self._call.write(message)
                if self._finishing and not len(self._core):
                    await self._call.done_writing()
                    return
                await self._news.wait()
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the stream has ended; the reader is told how

    async def _read(self) -> None:
        try:
            code, details = await self._read_all()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self._abandon()
                raise
            # Cancelled by the server, if not by `_abandon`, which has settled all calls already.
            code, details = grpc.StatusCode.CANCELLED, "the server cancelled the stream"
        self._settle(self._core.on_end(code, details))
        self._stop()

    async def _read_all(self) -> tuple[grpc.StatusCode, str]:
        read = self._call.read
        try:
            while (response := await read()) is not grpc.aio.EOF:
                self._settle(self._core.on_message(response))
                if self._finishing:
                    self._news.set()
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""

    def _settle(self, settled: Settled[tuple[Future, Deadline]]) -> None:
        for (future, _), outcome in settled:
            if future.done():
                continue
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _set_timer(self) -> None:
        """See to it that calls end at their deadlines even if the server stays silent."""
        expiry = self._core.next_expiry()
        if expiry is None or (self._timer is not None and self._timer.when() <= expiry):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(expiry, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        for future, deadline in self._core.expire(self._loop.time()):
            if not future.done():
                future.set_exception(deadline.missed())
        self._set_timer()
