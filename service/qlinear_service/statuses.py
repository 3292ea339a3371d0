"""Where errors become statuses: the one table, for unary calls and for calls on a stream alike.

Only our own errors carry their text to the client; anything else becomes INTERNAL with an id that
stands in the log beside the cause. Knows no transport: who asks puts the status on the wire.
"""

import logging
import uuid
from dataclasses import dataclass

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
    UnknownMessage,
)
from qlinear_service.log_quota import LogQuota
from qlinear_service.log_values import event

__all__ = ["STATUS_OF", "Status", "code_of", "status_of"]

logger = logging.getLogger(__name__)

STATUS_OF: dict[type[RequestError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownLayer: grpc.StatusCode.NOT_FOUND,
    UnknownMessage: grpc.StatusCode.UNIMPLEMENTED,
    TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    EngineFailure: grpc.StatusCode.INTERNAL,
}

CLIENT_FAULTS = (InvalidRequest, UnknownLayer, UnknownMessage, TooLarge)

REFUSALS = LogQuota(most=50, seconds=10.0)
"""Of a server's log, whatever its clients get wrong; the metrics count all of it."""

MAX_TEXT = 1500
"""Texts travel in trailers, of which clients accept 8 KiB, with up to three bytes a character."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a caller is told."""

    code: grpc.StatusCode
    text: str
    retry_after_seconds: float | None = None
    """How long to wait before sending the call again; None: that would not help."""


def code_of(error: BaseException) -> grpc.StatusCode:
    """Return the status of a call that ended with `error`."""
    if isinstance(error, RequestError):
        return STATUS_OF[type(error)]
    if isinstance(error, DecodeError):
        return grpc.StatusCode.INVALID_ARGUMENT
    return grpc.StatusCode.INTERNAL


def status_of(
    error: BaseException, method: str, *, request: str = "", trace_id: str = ""
) -> Status:
    """Return what to tell the caller whose call ended with `error`, and log it once.

    Args:
        error: anything that a call has raised.
        method: the RPC, for the log.
        request: the caller's own id of the call, for the log.
        trace_id: of the trace that shows it, for the log.
    """
    ids = {"request": request, "trace": trace_id}
    values = {"method": method, **{name: value for name, value in ids.items() if value}}
    if not isinstance(error, RequestError):
        incident = uuid.uuid4().hex[:12]
        event(logger, logging.ERROR, "call_failed", incident=incident, **values, exc_info=error)
        text = f"the call failed; the server's log has the cause under {incident}"
        return Status(grpc.StatusCode.INTERNAL, text)
    code, text = code_of(error), str(error)
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + "..."
    values |= {"code": code.name, "text": text}
    if isinstance(error, EngineFailure):
        # It was logged, with its cause, where it arose; this line says whose call it was.
        event(logger, logging.INFO, "call_refused", **values)
    else:
        _log_refusal(isinstance(error, CLIENT_FAULTS), values)
    return Status(code, text, getattr(error, "retry_after_seconds", None))


def _log_refusal(is_clients_fault: bool, values: dict[str, str]) -> None:
    """Log a call that was refused; neither overload nor clients that err may flood the log."""
    if logger.isEnabledFor(logging.DEBUG):
        event(logger, logging.INFO if is_clients_fault else logging.DEBUG, "call_refused", **values)
    elif is_clients_fault and (left_out := REFUSALS.ask()) is not None:
        more = {"left_out": left_out} if left_out else {}
        event(logger, logging.INFO, "call_refused", **values, **more)
