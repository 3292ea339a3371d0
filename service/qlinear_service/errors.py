"""Every error that this service raises on purpose.

    QlinearError
    ├── ConfigError            a flag, variable or file key that cannot be used
    ├── BuildError             the kernel library cannot be built or loaded
    ├── CheckpointError        a model file that cannot be read as what it claims to be
    ├── SelfTestError          a kernel disagrees with the reference at start
    ├── OutOfDeviceMemory      the layers do not fit onto the device
    ├── EngineLost             the device fails whatever is asked of it; only a new process helps
    └── RequestError           one call fails; the server and all other calls go on
        ├── InvalidRequest     shape, dtype, byte count or field that breaks the contract
        ├── UnknownLayer       no loaded layer has that name
        ├── UnknownMessage     a message of a stream asks for what this server does not know
        ├── TooLarge           over a published limit; sending it again will not help
        ├── Overloaded         no room now; sending it again later will help
        ├── DeadlineExceeded   its deadline passed before it ran
        ├── Cancelled          its caller took it back before it ran
        ├── Unavailable        starting, draining or without an engine
        └── EngineFailure      the computation failed; the text has only an id that is in the log

Texts are written for the caller: what was given, what is expected, how to fix it.
`statuses.py` holds the one table from these classes to gRPC status codes.
"""

from pathlib import Path

from qlinear_service.log_values import printable

__all__ = [
    "ActivationsGone",
    "BuildError",
    "Cancelled",
    "CheckpointError",
    "ConfigError",
    "DeadlineExceeded",
    "EngineFailure",
    "EngineLost",
    "InvalidRequest",
    "OutOfDeviceMemory",
    "Overloaded",
    "QlinearError",
    "RequestError",
    "SelfTestError",
    "TooLarge",
    "Unavailable",
    "UnknownLayer",
    "UnknownMessage",
]


class QlinearError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(QlinearError):
    """A flag, environment variable or configuration key that cannot be used."""


class BuildError(QlinearError):
    """The kernel library cannot be built or loaded; the text names the missing tool."""


class SelfTestError(QlinearError):
    """A kernel's answer differs from the reference at start; serving would be wrong."""


class OutOfDeviceMemory(QlinearError):
    """The layers that are to be served do not fit onto the device."""


class EngineLost(QlinearError):
    """The device fails whatever is asked of it; no call can be computed in this process."""


class ActivationsGone(QlinearError):
    """A batch failed when results had taken the place of its rows; it cannot be tried again."""


class CheckpointError(QlinearError):
    """A model file cannot be read as what it claims to be.

    Args:
        path: the file or folder at fault.
        problem: one sentence: what was found, what is expected, how to fix it.
        tensor: the tensor or module at fault, where there is one.
    """

    def __init__(self, path: str | Path, problem: str, *, tensor: str | None = None) -> None:
        # Names come from files and may hold anything.
        self.path = printable(str(path))
        self.tensor = None if tensor is None else printable(tensor)
        self.problem = printable(problem)
        where = self.path if tensor is None else f"{self.path}: {self.tensor}"
        super().__init__(f"{where}: {self.problem}")


class RequestError(QlinearError):
    """One call fails; nothing else is touched."""

    reason = ""
    """Why the server did not want the call, in one of few words for metrics; "" if it did."""


class InvalidRequest(RequestError):
    """The call breaks the contract: shape, dtype, byte count, or a field."""


class UnknownLayer(RequestError):
    """No loaded layer has the name that was asked for."""


class UnknownMessage(RequestError):
    """A message of a stream has no body that this server knows; a newer one may know it."""


class TooLarge(RequestError):
    """The call is over a published limit; the same call will never pass."""

    reason = "too_large"


class Overloaded(RequestError):
    """There is no room now.

    Args:
        problem: one sentence.
        retry_after_seconds: how long to wait before sending it again.
        reason: what there is no room in, or "other".
    """

    def __init__(self, problem: str, *, retry_after_seconds: float, reason: str = "other") -> None:
        self.retry_after_seconds = retry_after_seconds
        self.reason = reason
        super().__init__(problem)


class DeadlineExceeded(RequestError):
    """The call's deadline passed before it ran; it was not computed."""


class Cancelled(RequestError):
    """The caller took the call back before it ran."""


class Unavailable(RequestError):
    """The server is starting, draining or has no engine; another server may answer."""

    reason = "not_serving"


class EngineFailure(RequestError):
    """The computation failed; `incident` stands in the log beside the cause."""

    def __init__(self, incident: str) -> None:
        self.incident = incident
        super().__init__(f"the computation failed; the server's log has the cause under {incident}")
