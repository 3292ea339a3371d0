"""One MatMulStream: many calls in flight, each answered exactly once, as they finish.

The reader takes messages while there is room for their answers; each call, once settled, puts its
encoded answer where the writer finds it. So there are two tasks for a stream and none for a call.
Calls that come while answers wait to be sent gather, and enter the queue together: the answer of
any of them would wait behind those, and one batch of many costs less than many of a few
(docs/decisions/0003-small-batches.md). Knows no tensor.
"""

import asyncio
from collections import deque
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from qlinear.v1 import linear_pb2
from qlinear_service.callers import Caller
from qlinear_service.calls import Serving
from qlinear_service.codec import requested_layers
from qlinear_service.errors import InvalidRequest, Unavailable, UnknownMessage
from qlinear_service.lifecycle import Lifecycle
from qlinear_service.stream_call import METHOD, StreamCall
from qlinear_service.stream_reader import StreamReader
from qlinear_service.tracing import kept_trace_id, valid_traceparent
from qlinear_service.wire import StreamFields

__all__ = ["CallStream"]

GOING_AWAY = linear_pb2.StreamResponse(going_away=linear_pb2.GoingAway()).SerializeToString()

HANGUP_SECONDS = 5.0
"""How long to wait for gRPC to say that the client is gone once a write has shown it."""

SEND_NANOSECONDS = 20_000
"""Sending one answer takes at least so long (docs/performance.md)."""

MOST_GATHERED_BYTES = 1 << 20
"""Activations of calls that gather, which the limits of the queue do not see yet."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


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
        self._caller = Caller(context)
        self._traces = serving.tracer is not None or self._caller.traceparent is not None
        self._messages = StreamReader()
        self._unanswered: dict[int, StreamCall] = {}
        self._held_bytes = 0
        self._gathered: list[StreamCall] = []
        self._gathered_bytes = 0
        self._kernel_nanoseconds = 0  # of the last batch that gave a result
        self._finished: deque[tuple[StreamCall | None, bytes]] = deque()
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
                if self._gathered and not self._may_gather():
                    self._submit_gathered()
            if reader.done():
                reader.result()
            if not self._unanswered and (self._leaving or reader.done()):
                return
            await self._news.wait()

    async def _read(self) -> None:
        read = self._context.read
        while (raw := await read()) is not grpc.aio.EOF:
            message = self._parse(raw)
            if message.body == "cancel":
                self._cancel(message.request_id)
            else:
                await self._answer(message)

    def _parse(self, raw: bytes) -> StreamFields:
        try:
            return self._messages.read(raw)
        except DecodeError:
            text = "a message of the stream is no valid StreamRequest, so it has no id to answer"
            raise InvalidRequest(text) from None

    async def _answer(self, message: StreamFields) -> None:
        """See to it that this message gets its one answer; wait while there is no room for it."""
        call = self._enter(message)
        if self._traces or message.traceparent:
            self._trace(call, message.traceparent)
        deadline = self._deadline_of(message)
        came_too_late, limits = self._leaving, self._serving.limits
        while len(self._unanswered) > limits.max_stream_calls:
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
            call.deadline = deadline
            call.wants_timing = message.want_timing
            # Until its answer fits, or no other is left.
            response_bytes = call.checked.plan.response_bytes
            while self._held_bytes and self._held_bytes + response_bytes > limits.max_stream_bytes:
                await self._until_room()
            self._carry(call)
        except Exception as error:
            call.fail(error)

    def _trace(self, call: StreamCall, text: str) -> None:
        """See to what shows the call: its own context goes before that of its stream."""
        own, caller, tracer = valid_traceparent(text), self._caller, self._serving.tracer
        traceparent = own or caller.traceparent
        if tracer is not None:
            state = "" if own else caller.tracestate
            call.trace = tracer.begin(METHOD, traceparent, state, call.since / 1e9)
        trace = call.trace
        call.trace_id = kept_trace_id(traceparent) if trace is None else trace.trace_id

    def _carry(self, call: StreamCall) -> None:
        """Send a checked call on its way, at once or with those that come while answers leave."""
        checked = call.checked
        assert checked is not None, "checked before it is carried"
        if checked.plan.rows == 0:
            call.succeed(self._serving.outcomes_of_nothing(checked))
            return
        call.held_bytes = checked.plan.response_bytes
        self._held_bytes += call.held_bytes
        self._gathered.append(call)
        self._gathered_bytes += checked.plan.x_bytes
        if not self._may_gather():
            self._submit_gathered()

    def _may_gather(self) -> bool:
        """Say whether sending what is ready takes longer than the next batch will, probably."""
        left = len(self._finished) * SEND_NANOSECONDS
        return left > self._kernel_nanoseconds and self._gathered_bytes <= MOST_GATHERED_BYTES

    def _submit_gathered(self) -> None:
        calls, self._gathered, self._gathered_bytes = self._gathered, [], 0
        for call in calls:
            try:
                call.submit()
            except Exception as error:
                call.fail(error)

    def _enter(self, message: StreamFields) -> StreamCall:
        request_id = message.request_id
        if request_id in self._unanswered or request_id == 0:
            problem = "was sent again before its answer" if request_id else "is no id"
            raise InvalidRequest(
                f"request_id {request_id} {problem}; expected 1 or more, and unique among the "
                "unanswered requests of the stream"
            )
        call = StreamCall(
            request_id,
            serving=self._serving,
            finish=self._finish,
            client=self._caller.client,
            stream_id=self._caller.request_id,
        )
        self._unanswered[request_id] = call
        return call

    def _finish(self, call: StreamCall, raw: bytes) -> None:
        self._kernel_nanoseconds = call.kernel_nanoseconds or self._kernel_nanoseconds
        self._finished.append((call, raw))
        self._news.set()

    def _cancel(self, request_id: int) -> None:
        if request_id == 0:
            raise InvalidRequest("request_id 0 is no id; expected that of the call to cancel")
        call = self._unanswered.get(request_id)
        if call in self._gathered:
            self._submit_gathered()
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
        self._gathered.clear()
        self._finished.clear()

    def _deadline_of(self, message: StreamFields) -> float | None:
        if message.timeout_nanoseconds == 0:
            return self._deadline
        own = self._loop.time() + message.timeout_nanoseconds * 1e-9
        return own if self._deadline is None else min(own, self._deadline)

    async def _until_room(self) -> None:
        """Wait until one more answer is on its way to the client."""
        self._room.clear()
        await self._room.wait()
