"""One call of a stream, from its message to its one answer.

Knows what the call is and how it ended; which calls a stream has, and when they are read and
written, is the business of `streaming.py`. Holds no tensor.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from qlinear.v1 import linear_pb2
from qlinear_service.calls import Serving
from qlinear_service.codec import CheckedRequest
from qlinear_service.results import Answer, Outcome
from qlinear_service.statuses import status_of
from qlinear_service.tracing import CallTrace
from qlinear_service.transport import Carried
from qlinear_service.wire import stream_result

__all__ = ["METHOD", "StreamCall"]

METHOD = "MatMulStream"

NO_BYTES = memoryview(b"")

Finish: TypeAlias = Callable[["StreamCall", bytes], None]


class StreamCall:
    """One id that has no answer yet.

    Args:
        request_id: the client's number for it.
        serving: what calls do.
        finish: told once of the call and its encoded answer.
        client: whose it is.
        stream_id: its client's own name for the stream, for the log.
    """

    __slots__ = (
        *("carried", "checked", "deadline", "finish", "held_bytes", "is_finished"),
        *("kernel_nanoseconds", "layers", "request_id", "serving", "since"),
        *("trace", "trace_id", "wants_timing", "client", "stream_id"),
    )

    def __init__(
        self,
        request_id: int,
        *,
        serving: Serving,
        finish: Finish,
        client: str = "",
        stream_id: str = "",
    ) -> None:
        self.request_id = request_id
        self.serving = serving
        self.finish = finish
        self.client = client
        self.stream_id = stream_id
        self.since = time.perf_counter_ns()
        self.layers: Sequence[str] = ()
        self.checked: CheckedRequest | None = None
        self.carried: Carried | None = None
        self.held_bytes = 0
        """Of its answer."""
        self.deadline: float | None = None
        self.trace: CallTrace | None = None
        self.trace_id = ""
        """The trace that shows it, ours or its caller's; "" if none does."""
        self.wants_timing = False
        self.is_finished = False
        self.kernel_nanoseconds = 0
        """What its batch took, once there is a result."""

    def submit(self) -> None:
        """Send a checked call on its way.

        Raises:
            Overloaded: there is no room.
        """
        checked = self.checked
        assert checked is not None, "checked before it is submitted"
        self.carried = self.serving.transport.submit(
            checked,
            deadline=self.deadline,
            traceparent=None if self.trace is None else self.trace.traceparent,
            client=self.client,
            settle=self.settle,
        )
        # The activations are in their slot: a view of them here would keep the whole message.
        self.checked = CheckedRequest(checked.plan, NO_BYTES)

    def settle(self, answer: Answer) -> None:
        """Answer with what has come of it."""
        if self.is_finished:
            return  # the stream has ended and dropped the call
        if isinstance(answer, list):
            self.succeed(answer)
        else:
            self.fail(answer)

    def succeed(self, outcomes: list[Outcome]) -> None:
        """Answer with results; they are copied now, as a view would keep its whole batch alive."""
        assert self.checked is not None, "what has outcomes was checked"
        since = self.since if self.wants_timing else None
        try:
            parts = self.serving.encode(self.checked, outcomes, timed_since=since, trace=self.trace)
            raw = stream_result(self.request_id, parts)
        except Exception as error:
            # The id would never be answered.
            self.fail(error)
        else:
            self.kernel_nanoseconds = outcomes[0].kernel_nanoseconds
            self.count("OK")
            self.finish(self, raw)

    def fail(self, error: BaseException) -> None:
        """Answer with the status of `error`."""
        request = f"{self.stream_id}#{self.request_id}"
        status = status_of(error, METHOD, request=request, trace_id=self.trace_id)
        response = linear_pb2.StreamResponse(request_id=self.request_id)
        response.error.code = status.code.value[0]
        response.error.message = status.text
        if status.retry_after_seconds is not None:
            response.error.retry_after_nanoseconds = round(status.retry_after_seconds * 1e9)
        self.count(status.code.name, reason=getattr(error, "reason", ""))
        self.finish(self, response.SerializeToString())

    def count(self, code: str, *, reason: str = "") -> None:
        """Tell metrics and the tracer how the call has ended."""
        self.is_finished = True
        seconds = (time.perf_counter_ns() - self.since) / 1e9
        self.serving.metrics.call_finished(
            METHOD, self.layers, code, seconds, reason=reason, trace_id=self.trace_id
        )
        if self.trace is not None:
            self.trace.end(code)
