"""Where errors become statuses: the one table, and the wrapper of every unary call that uses it.

Also decodes and encodes messages, so that bytes which are no message get a status of ours, and
counts calls in and out for the drain. Knows no layer and no tensor.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from qlinear_service.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    RequestError,
    TooLarge,
    Unavailable,
    UnknownLayer,
)
from qlinear_service.lifecycle import Lifecycle

__all__ = ["STATUS_OF", "StatusInterceptor"]

logger = logging.getLogger(__name__)

SERVICE_PREFIX = "/qlinear.v1."

STATUS_OF: dict[type[RequestError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownLayer: grpc.StatusCode.NOT_FOUND,
    TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    EngineFailure: grpc.StatusCode.INTERNAL,
}

CLIENT_FAULTS = (InvalidRequest, UnknownLayer, TooLarge)

MAX_TEXT = 1500
"""Texts travel in trailers, of which clients accept 8 KiB, with up to three bytes a character."""

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = Any  # grpc.RpcMethodHandler, whose stub is generic and whose class is not
Behavior: TypeAlias = Callable[[bytes, Context], Awaitable[bytes]]


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the unary methods of our services; health and reflection pass untouched.

    Args:
        lifecycle: says whether calls may enter, and counts them.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the method's handler, wrapped once and remembered."""
        method = handler_call_details.method
        if method in self._wrapped:
            return self._wrapped[method]
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith(SERVICE_PREFIX) or not handler.unary_unary:
            return handler
        behavior = self._with_status(method, handler)
        # No serializers: grpc.aio would answer bytes that are no message with UNKNOWN.
        self._wrapped[method] = grpc.unary_unary_rpc_method_handler(behavior)
        return self._wrapped[method]

    def _with_status(self, method: str, handler: Handler) -> Behavior:
        parse, serialize = handler.request_deserializer, handler.response_serializer
        serve: Any = handler.unary_unary
        assert parse is not None, "generated handlers parse"
        assert serialize is not None, "generated handlers serialize"

        async def behavior(raw: bytes, context: Context) -> bytes:
            count = self._lifecycle.counting
            count.enter()
            # Not when the method returns but when its answer has been handed to the network:
            # server.stop() does not wait for aborted calls (grpc/grpc#37239).
            context.add_done_callback(lambda _: count.leave())  # type: ignore[arg-type]
            try:
                self._lifecycle.check()
                response: bytes = serialize(await serve(parse(raw), context))
                return response
            except RequestError as error:
                await _abort_with(error, method, context)
            except DecodeError:
                text = f"the request is not a valid message for {method}"
                await _abort_with(InvalidRequest(text), method, context)
            except asyncio.CancelledError as error:
                await _cancelled(error, method, context)
            except Exception as error:
                await _abort_unknown(error, method, context)
            raise AssertionError("every branch above has raised")

        return behavior


async def _abort_with(error: RequestError, method: str, context: Context) -> None:
    code = STATUS_OF[type(error)]
    trailers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded):
        milliseconds = max(1, round(error.retry_after_seconds * 1000))
        trailers = (("grpc-retry-pushback-ms", str(milliseconds)),)
    text = str(error)
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + "..."
    # Overload must not flood the log, and failures were logged, with their cause, where they arose.
    level = logging.INFO if isinstance(error, CLIENT_FAULTS) else logging.DEBUG
    logger.log(level, "call_refused method=%s code=%s text=%r", method, code.name, text)
    await context.abort(code, text, trailers)


async def _cancelled(error: asyncio.CancelledError, method: str, context: Context) -> None:
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise error  # gRPC cancelled this call: nobody is left to be told
    # Something inside was cancelled, the call was not: raising on would leave the client
    # without any answer (grpc/grpc#29248).
    await _abort_unknown(error, method, context)


async def _abort_unknown(error: BaseException, method: str, context: Context) -> None:
    incident = uuid.uuid4().hex[:12]
    logger.error("call_failed incident=%s method=%s", incident, method, exc_info=error)
    await context.abort(
        grpc.StatusCode.INTERNAL,
        f"the call failed; the server's log has the cause under {incident}",
    )
