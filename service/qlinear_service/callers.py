"""What a call's metadata says of its caller: whose turn it takes, its trace, its own id of it.

No proof of anything: a client that takes another's name shares its turns with it.
"""

from typing import Any, TypeAlias

import grpc

from qlinear_service.tracing import CallTrace, Tracer, kept_trace_id, valid_traceparent

__all__ = ["CLIENT_KEY", "Caller"]

CLIENT_KEY = "qlinear-client-id"
REQUEST_KEY = "x-request-id"
TIMING_KEY = "qlinear-want-timing"

MOST_ID_LENGTH = 128

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class Caller:
    """Of one unary call, or of one stream.

    Args:
        context: of the call or stream.
    """

    __slots__ = (
        *("client", "request_id", "trace", "trace_id", "traceparent", "tracestate"),
        "wants_timing",
    )

    def __init__(self, context: Context) -> None:
        metadata: Any = context.invocation_metadata() or ()  # each question makes it anew
        found = dict(metadata)
        client = found.get(CLIENT_KEY)
        # "ipv4:10.0.0.1:4711" or "ipv6:%5B::1%5D:4711": all connections of a machine are one.
        self.client = f"id:{client!s}" if client else str(context.peer()).rpartition(":")[0]
        self.wants_timing = found.get(TIMING_KEY) == "1"
        self.traceparent: str | None = None
        self.tracestate = self.request_id = self.trace_id = ""
        """`request_id`: as it calls the call in its own logs. `trace_id`: of the trace that shows a
        unary call, ours or its own; "" if none does."""
        self.trace: CallTrace | None = None
        """Of a unary call, if it is traced."""
        if "traceparent" in found:
            self.traceparent = valid_traceparent(str(found["traceparent"]))
            self.tracestate = str(found.get("tracestate", ""))
            self.trace_id = kept_trace_id(self.traceparent)
        if REQUEST_KEY in found:
            self.request_id = str(found[REQUEST_KEY])[:MOST_ID_LENGTH]

    def begin(self, tracer: Tracer, method: str, arrived: float) -> None:
        """Have a unary call traced, if it is to be."""
        self.trace = tracer.begin(method, self.traceparent, self.tracestate, arrived)
        if self.trace is not None:
            self.trace_id = self.trace.trace_id
