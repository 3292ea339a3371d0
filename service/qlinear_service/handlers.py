"""The RPCs as gRPC sees them: bytes in, bytes out, each call counted and every error a status.

Messages are decoded and encoded here, so that bytes which are no message get a status of ours, and
metrics are told of each unary call; streams do all this themselves, message by message. Handlers
are registered as they are: interceptors would cost every call another layer. Knows no layer and no
tensor.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from qlinear.v1 import linear_pb2
from qlinear_service.callers import Caller
from qlinear_service.codec import requested_layers
from qlinear_service.errors import InvalidRequest, RequestError
from qlinear_service.lifecycle import Lifecycle
from qlinear_service.metrics import Metrics
from qlinear_service.servicer import LinearServicer
from qlinear_service.statuses import Status, code_of, status_of
from qlinear_service.tracing import Tracer
from qlinear_service.wire import read_call

__all__ = ["SERVICE", "Handlers"]

SERVICE = linear_pb2.DESCRIPTOR.services_by_name["QuantizedLinear"].full_name

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Behavior: TypeAlias = Callable[[Any, Context], Awaitable[Any]]


class Handlers:
    """Makes the handlers of one servicer's methods.

    Args:
        servicer: answers calls.
        lifecycle: says whether calls may enter, and counts them.
        metrics: told of each unary call.
        tracer: told of each MatMul, if calls are traced.
    """

    def __init__(
        self,
        servicer: LinearServicer,
        *,
        lifecycle: Lifecycle,
        metrics: Metrics,
        tracer: Tracer | None = None,
    ) -> None:
        self._servicer = servicer
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._tracer = tracer

    def generic_handler(self) -> grpc.GenericRpcHandler:
        """Return what a server registers for the service."""
        servicer, encode = self._servicer, _serialized
        unary: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes], Any]] = {
            "MatMul": (read_call, bytes, servicer.MatMul),
            "ListLayers": (linear_pb2.ListLayersRequest.FromString, encode, servicer.ListLayers),
            "GetServerInfo": (
                linear_pb2.GetServerInfoRequest.FromString,
                encode,
                servicer.GetServerInfo,
            ),
        }
        # No serializers: grpc.aio would answer bytes that are no message with UNKNOWN.
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._with_status(name, self._unary(name, *method))
            )
            for name, method in unary.items()
        }
        handlers["MatMulStream"] = grpc.stream_stream_rpc_method_handler(
            self._with_status("MatMulStream", self._stream(servicer.MatMulStream))
        )
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _with_status(self, name: str, serve: Behavior) -> Behavior:
        method = f"/{SERVICE}/{name}"

        async def behavior(received: Any, context: Context) -> Any:
            count = self._lifecycle.counting
            count.enter()
            # Not when the method returns but when its answer has been handed to the network:
            # server.stop() does not wait for aborted calls (grpc/grpc#37239).
            # The task is gRPC's own for the whole call. A callback on the context would do, but
            # makes a cycle of references that keeps each call's memory until a full collection.
            task = asyncio.current_task()
            assert task is not None, "gRPC runs methods in tasks"
            task.add_done_callback(lambda _: count.leave())
            try:
                return await serve(received, context)
            except DecodeError:
                text = f"the request is not a valid message for {method}"
                status = _status_of(InvalidRequest(text), method, context)
            except asyncio.CancelledError as error:
                if _is_cancelled():
                    raise  # gRPC cancelled this call: nobody is left to be told
                # Something inside was cancelled, the call was not: raising on would leave the
                # client without any answer (grpc/grpc#29248).
                status = _status_of(error, method, context)
            except Exception as error:
                status = _status_of(error, method, context)
            await _abort(status, context)
            return b""  # unread: gRPC looks at how the call was aborted first

        return behavior

    def _unary(
        self, name: str, parse: Callable[[bytes], Any], encode: Callable[[Any], bytes], serve: Any
    ) -> Behavior:
        """Return a unary method from bytes to bytes, which counts its calls."""
        tracer = self._tracer if name == "MatMul" else None

        async def behavior(raw: bytes, context: Context) -> bytes:
            arrived = time.perf_counter()
            caller = Caller(context)
            if tracer is not None:
                caller.begin(tracer, name, arrived)
            request: object = None
            try:
                self._lifecycle.check()
                request = parse(raw)
                response = encode(await serve(request, context, caller))
            except BaseException as error:
                code, reason = _end_of(error, context)
                self._finished(name, request, caller, code.name, arrived, reason)
                raise
            self._finished(name, request, caller, "OK", arrived)
            return response

        return behavior

    def _finished(
        self,
        name: str,
        request: object,
        caller: Caller,
        code: str,
        arrived: float,
        reason: str = "",
    ) -> None:
        """Tell metrics and the tracer how a unary call has ended."""
        self._metrics.call_finished(
            name,
            requested_layers(request),
            code,
            time.perf_counter() - arrived,
            reason=reason,
            trace_id=caller.trace_id,
        )
        if caller.trace is not None:
            caller.trace.end(code)

    def _stream(self, serve: Behavior) -> Behavior:
        """Return a method of streams; it counts its calls itself, and this a stream it refuses."""

        async def behavior(received: Any, context: Context) -> None:
            arrived = time.perf_counter()
            try:
                self._lifecycle.check()
                await serve(received, context)
            except (RequestError, DecodeError) as error:
                seconds = time.perf_counter() - arrived
                code, reason = code_of(error).name, getattr(error, "reason", "")
                self._metrics.call_finished("MatMulStream", (), code, seconds, reason=reason)
                raise

        return behavior


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _end_of(error: BaseException, context: Context) -> tuple[grpc.StatusCode, str]:
    """Return the status of a call that ended with `error`, and why it was refused, if it was."""
    if isinstance(error, asyncio.CancelledError) and _is_cancelled():
        # gRPC cancels a call at its deadline just as when its client leaves.
        if context.time_remaining() == 0:
            return grpc.StatusCode.DEADLINE_EXCEEDED, ""
        return grpc.StatusCode.CANCELLED, ""
    return code_of(error), getattr(error, "reason", "")


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())


def _status_of(error: BaseException, method: str, context: Context) -> Status:
    """Return the status that tells the caller of an error; the log names the caller's own ids."""
    caller = Caller(context)
    return status_of(error, method, request=caller.request_id, trace_id=caller.trace_id)


async def _abort(status: Status, context: Context) -> None:
    """End the call with `status`; the method then has nothing more to do than to return.

    To be called with no error in hand. gRPC keeps what `abort` raises with the call, and raises it
    again by itself. With the frames that it came through, and the error that it came from, it would
    be a cycle of 60 objects for each call that is refused: with a full queue, a garbage collection
    of 50 ms every second, in which nobody is refused or answered.
    """
    trailers: tuple[tuple[str, str], ...] = ()
    if status.retry_after_seconds is not None:
        milliseconds = max(1, round(status.retry_after_seconds * 1000))
        trailers = (("grpc-retry-pushback-ms", str(milliseconds)),)
    try:
        await context.abort(status.code, status.text, trailers)
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = None
    except grpc.aio.InternalError:
        # gRPC ended the call a moment ago, at its deadline or as its client left: nobody to tell.
        # Any other error than this gRPC logs as a fault of ours, with its traceback.
        raise asyncio.CancelledError from None
