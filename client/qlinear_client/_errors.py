"""Every error that a call can raise: one class for each status a server answers with.

    CallError                   any status that has no class of its own
    ├── InvalidArgument         shape, dtype, layer or option that breaks the contract
    ├── NotFound                no loaded layer has that name
    ├── ResourceExhausted       over a limit (not retryable) or no room now (retryable)
    ├── DeadlineExceeded        no answer before the deadline
    ├── Cancelled               taken back, or the client was closed meanwhile
    ├── Unavailable             no server, or one that starts or drains
    ├── Internal                the computation failed, or an answer breaks the contract
    ├── Unimplemented           this server does not know the call
    ├── Unauthenticated         no or wrong credentials
    └── PermissionDenied        the credentials do not allow it

The same class is raised whether the client finds the mistake before sending or the server after.
"""

from typing import ClassVar

import grpc

__all__ = [
    "CallError",
    "Cancelled",
    "DeadlineExceeded",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "PermissionDenied",
    "ResourceExhausted",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "error_class",
]


class CallError(Exception):
    """A call that got no result.

    Attributes:
        code: the gRPC status.
        message: what was given, what is expected, how to fix it.
        retryable: True if the same call may pass later.
        retry_after_seconds: how long the server asks to wait first; None if it does not say.
    """

    default_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        retryable: bool = False,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = self.default_code if code is None else code
        self.message = message
        self.retryable = retryable
        self.retry_after_seconds = retry_after_seconds


class InvalidArgument(CallError):
    """The call breaks the contract: shape, dtype, layer or option."""

    default_code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(CallError):
    """No loaded layer has the name; the message lists near matches."""

    default_code = grpc.StatusCode.NOT_FOUND


class ResourceExhausted(CallError):
    """Over a published limit (not retryable), or the server has no room now (retryable)."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineExceeded(CallError):
    """No answer came before the deadline; what had not run by then is never computed."""

    default_code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(CallError):
    """The call was taken back, or its client was closed while it waited."""

    default_code = grpc.StatusCode.CANCELLED


class Unavailable(CallError):
    """No server answered, or one that is starting, draining or without its engine."""

    default_code = grpc.StatusCode.UNAVAILABLE


class Internal(CallError):
    """The computation failed on the server, or an answer does not fit what was asked."""

    default_code = grpc.StatusCode.INTERNAL


class Unimplemented(CallError):
    """The server at this address does not know the call."""

    default_code = grpc.StatusCode.UNIMPLEMENTED


class Unauthenticated(CallError):
    """The server wants credentials and got none, or wrong ones."""

    default_code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(CallError):
    """The credentials are known and do not allow this call."""

    default_code = grpc.StatusCode.PERMISSION_DENIED


_CLASSES = {
    kind.default_code: kind
    for kind in (
        InvalidArgument,
        NotFound,
        ResourceExhausted,
        DeadlineExceeded,
        Cancelled,
        Unavailable,
        Internal,
        Unimplemented,
        Unauthenticated,
        PermissionDenied,
    )
}


def error_class(code: grpc.StatusCode) -> type[CallError]:
    """Return the class of a status: its own, or `CallError` where it has none."""
    return _CLASSES.get(code, CallError)
