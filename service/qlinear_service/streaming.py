"""One MatMulStream: many calls in flight, each answered exactly once, as they finish.

The reader takes messages while there is room for their answers; each call's future, once done,
puts the encoded answer where the writer finds it. So there are two tasks for a stream and none for
a call. Checks, statuses and transport are those of unary calls; the table of unanswered calls is
this module's. Knows no tensor.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from qlinear.v1 import linear_pb2
from qlinear_service.calls import Serving
from qlinear_service.codec import CheckedRequest, requested_layers
from qlinear_service.errors import InvalidRequest, Unavailable, UnknownMessage
from qlinear_service.lifecycle import Lifecycle
from qlinear_service.results import Outcome
from qlinear_service.statuses import status_of
from qlinear_service.tracing import valid_traceparent
from qlinear_service.transport import Carried
from qlinear_service.wire import StreamFields, read_stream_message, stream_result

__all__ = ["CallStream"]

METHOD = "MatMulStream"

GOING_AWAY = linear_pb2.StreamResponse(going_away=linear_pb2.GoingAway()).SerializeToString()

NO_BYTES = memoryview(b"")

HANGUP_SECONDS = 5.0
"""How long to wait for gRPC to say that the client is gone once a write has shown it."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Finish: TypeAlias = Callable[["_Call", bytes], None]


class _Call:
    """One id that has no answer yet."""

    __slots__ = (
        *("carried", "checked", "finish", "held_bytes", "is_finished"),
        *("layers", "request_id", "serving", "since", "wants_timing"),
    )

    def __init__(self, request_id: int, *, serving: Serving, finish: Finish) -> None:
        self.request_id = request_id
        self.serving = serving
        self.finish = finish
        self.checked: CheckedRequest | None = None
        self.carried: Carried | None = None
        self.held_bytes = 0
        self.is_finished = False
        self.layers: Sequence[str] = ()
        self.since = time.perf_counter_ns()
        self.wants_timing = False

    def settle(self, future: asyncio.Future[list[Outcome]]) -> None:
        """Answer with what the future holds."""
        if future.cancelled() or self.is_finished:
            return  # the stream has ended and dropped the call
        error = future.exception()
        if error is None:
            self.succeed(future.result())
        else:
            self.fail(error)

    def succeed(self, outcomes: list[Outcome]) -> None:
        """Answer with results; they are copied now, as a view would keep its whole batch alive."""
        assert self.checked is not None, "what has outcomes was checked"
        since = self.since if self.wants_timing else None
        try:
            parts = self.serving.encode(self.checked, outcomes, timed_since=since)
            raw = stream_result(self.request_id, parts)
        except Exception as error:
            # Nobody sees what a future's callback raises, and the id would never be answered.
            self.fail(error)
        else:
            self.count("OK")
            self.finish(self, raw)

    def fail(self, error: BaseException) -> None:
        """Answer with the status of `error`."""
        status = status_of(error, METHOD)
        response = linear_pb2.StreamResponse(request_id=self.request_id)
        response.error.code = status.code.value[0]
        response.error.message = status.text
        if status.retry_after_seconds is not None:
            response.error.retry_after_nanoseconds = round(status.retry_after_seconds * 1e9)
        self.count(status.code.name, reason=getattr(error, "reason", ""))
        self.finish(self, response.SerializeToString())

    def count(self, code: str, *, reason: str = "") -> None:
        """Tell metrics how the call has ended."""
        self.is_finished = True
        seconds = (time.perf_counter_ns() - self.since) / 1e9
        self.serving.metrics.call_finished(METHOD, self.layers, code, seconds, reason=reason)


class CallStream:
    """One stream from its first message to its last; use it once.

    Args:
        context: reads and writes bytes.
        serving: what calls do.
        lifecycle: tells when the server drains.
        max_age_seconds: when the client is told to open a new stream.
    """

    def __init__(
        self,
        context: Context,
        *,
        serving: Serving,
        lifecycle: Lifecycle,
        max_age_seconds: float,
    ) -> None:
        self._context = context
        self._serving = serving
        self._lifecycle = lifecycle
        self._max_age_seconds = max_age_seconds
        self._loop = asyncio.get_running_loop()
        remaining = context.time_remaining()
        self._deadline = None if remaining is None else self._loop.time() + remaining
        self._unanswered: dict[int, _Call] = {}
        self._held_bytes = 0
        self._finished: deque[tuple[_Call | None, bytes]] = deque()
        self._news = asyncio.Event()  # for the writer
        self._room = asyncio.Event()  # for the reader
        self._leaving = False

    async def run(self) -> None:
        """Serve until the client or the server ends the stream and all is answered.

        Raises:
            InvalidRequest: the client breaks the rules of ids; what is unanswered is dropped.
        """
        self._lifecycle.watch_drain(self.leave)
        timer = self._loop.call_later(self._max_age_seconds, self.leave)
        reader = asyncio.create_task(self._read(), name="stream reader")
        reader.add_done_callback(self._on_reader_end)
        try:
            await self._write(reader)
        except grpc.aio.InternalError:
            # The client is gone: drop its work now. gRPC is about to cancel this task.
            self._drop()
            await asyncio.sleep(HANGUP_SECONDS)
            raise
        finally:
            self._lifecycle.unwatch_drain(self.leave)
            timer.cancel()
            reader.cancel()
            self._drop()

    def leave(self) -> None:
        """Tell the client to go elsewhere, and end once all that it has sent so far is answered."""
        if not self._leaving:
            self._leaving = True
            self._finished.append((None, GOING_AWAY))
            self._news.set()

    def _on_reader_end(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            reader.exception()  # seen: a writer that was cancelled meanwhile will not ask for it
        self._news.set()

    async def _write(self, reader: asyncio.Task[None]) -> None:
        write = self._context.write
        while True:
            self._news.clear()
            while self._finished:
                call, raw = self._finished.popleft()
                if call is not None:
                    # Before the write: with the answer in hand the client may use the id again.
                    del self._unanswered[call.request_id]
                    self._held_bytes -= call.held_bytes
                    self._room.set()
                await write(raw)
            if reader.done():
                reader.result()
            if not self._unanswered and (self._leaving or reader.done()):
                return
            await self._news.wait()

    async def _read(self) -> None:
        read = self._context.read
        while (raw := await read()) is not grpc.aio.EOF:
            message = _parse(raw)
            if message.body == "cancel":
                self._cancel(message.request_id)
            else:
                await self._answer(message)

    async def _answer(self, message: StreamFields) -> None:
        """See to it that this message gets its one answer; wait while there is no room for it."""
        call = self._enter(message)
        deadline = self._deadline_of(message)
        came_too_late = self._leaving
        while len(self._unanswered) > self._serving.limits.max_stream_calls:
            await self._until_room()
        try:
            if came_too_late:
                raise Unavailable("this stream goes away; send the call on a new one")
            if message.call is None:
                raise UnknownMessage(
                    f"request {call.request_id} has no body that this server knows; expected call "
                    "or cancel"
                )
            call.layers = tuple(requested_layers(message.call))
            call.checked = self._serving.check(message.call)
            await self._until_bytes(call.checked.plan.response_bytes)
            self._submit(call, message, deadline)
        except Exception as error:
            call.fail(error)

    def _submit(self, call: _Call, message: StreamFields, deadline: float | None) -> None:
        checked = call.checked
        assert checked is not None, "checked before it is submitted"
        call.wants_timing = message.want_timing
        if checked.plan.rows == 0:
            call.succeed(self._serving.outcomes_of_nothing(checked))
            return
        traceparent = valid_traceparent(message.traceparent)
        call.carried = self._serving.transport.submit(
            checked, deadline=deadline, traceparent=traceparent
        )
        # The activations are in their slot: a view of them here would keep the whole message.
        call.checked = CheckedRequest(checked.plan, NO_BYTES)
        call.held_bytes = checked.plan.response_bytes
        self._held_bytes += call.held_bytes
        call.carried.future.add_done_callback(call.settle)

    def _enter(self, message: StreamFields) -> _Call:
        request_id = message.request_id
        if request_id in self._unanswered or request_id == 0:
            problem = "was sent again before its answer" if request_id else "is no id"
            raise InvalidRequest(
                f"request_id {request_id} {problem}; expected 1 or more, and unique among the "
                "unanswered requests of the stream"
            )
        call = _Call(request_id, serving=self._serving, finish=self._finish)
        self._unanswered[request_id] = call
        return call

    def _finish(self, call: _Call, raw: bytes) -> None:
        self._finished.append((call, raw))
        self._news.set()

    def _cancel(self, request_id: int) -> None:
        if request_id == 0:
            raise InvalidRequest("request_id 0 is no id; expected that of the call to cancel")
        call = self._unanswered.get(request_id)
        if call is not None and call.carried is not None:
            self._serving.transport.withdraw(call.carried)

    def _drop(self) -> None:
        """Forget all that is unanswered: nobody will read it."""
        # gRPC cancels a stream at its deadline just as when its client leaves.
        is_late = self._deadline is not None and self._deadline <= self._loop.time()
        for call in self._unanswered.values():
            if call.carried is not None:
                self._serving.transport.drop(call.carried)
            if not call.is_finished:
                call.count("DEADLINE_EXCEEDED" if is_late else "CANCELLED")
                call.is_finished = True
        self._unanswered.clear()
        self._finished.clear()

    def _deadline_of(self, message: StreamFields) -> float | None:
        if message.timeout_nanoseconds == 0:
            return self._deadline
        own = self._loop.time() + message.timeout_nanoseconds * 1e-9
        return own if self._deadline is None else min(own, self._deadline)

    async def _until_bytes(self, response_bytes: int) -> None:
        """Wait until an answer of so many bytes fits, or no other is left."""
        most = self._serving.limits.max_stream_bytes
        while self._held_bytes and self._held_bytes + response_bytes > most:
            await self._until_room()

    async def _until_room(self) -> None:
        """Wait until one more answer is on its way to the client."""
        self._room.clear()
        await self._room.wait()


def _parse(raw: bytes) -> StreamFields:
    try:
        return read_stream_message(raw)
    except DecodeError:
        text = "a message of the stream is no valid StreamRequest, so it has no id to answer"
        raise InvalidRequest(text) from None
