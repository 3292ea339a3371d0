"""Spans of calls and batches, through OpenTelemetry: the only file that knows it.

A call's span has children for receive, queue, transfer, kernel and reply, made when the reply is:
times were taken on the way, as for metrics. A batch belongs to all of its calls and to no trace of
theirs: it has a span of its own, linked to each call that is traced, and their queue, transfer and
kernel spans are linked to it. Calls that are not sampled cost no span.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from qlinear_service import __version__
from qlinear_service.tracing import BatchTrace, TracedOutcome, kept_trace_id

__all__ = ["CallSpans", "SpanTracer", "otlp_tracer"]

AFTER_KERNEL = ("from_device", "scatter")
"""Directions of copies of results; all others are of activations."""

CLOSE_SECONDS = 2
NOTHING = Context()
W3C = TraceContextTextMapPropagator()


def otlp_tracer(endpoint: str, ratio: float) -> "SpanTracer":
    """Return a tracer that sends spans to an OTLP collector.

    Args:
        endpoint: as in "http://127.0.0.1:4317"; https is encrypted.
        ratio: the share of calls without a caller's context that are traced.
    """
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http:"))
    return SpanTracer(BatchSpanProcessor(exporter), ratio)


class SpanTracer:
    """Makes spans.

    Args:
        processor: takes them when they end.
        ratio: of calls whose callers say nothing of a trace; others do as their callers say.
    """

    def __init__(self, processor: SpanProcessor, ratio: float) -> None:
        # W3C allows a sampled caller only: what is behind a call that is not traced is not either.
        calls = ParentBased(TraceIdRatioBased(ratio))
        self._providers = [_provider(sampler, processor) for sampler in (calls, ALWAYS_ON)]
        self._calls, self._batches = (
            provider.get_tracer("qlinear", __version__) for provider in self._providers
        )
        self._processor = processor
        self._ratio = ratio

    def begin(
        self, method: str, traceparent: str | None, tracestate: str, began: float
    ) -> "CallSpans | None":
        """See `Tracer.begin`."""
        kept = self._ratio > 0 if traceparent is None else bool(kept_trace_id(traceparent))
        if not kept:
            return None  # as the sampler would say, which takes it some 20 microseconds
        span = self._calls.start_span(
            f"qlinear.v1.QuantizedLinear/{method}",
            context=_context(traceparent, tracestate),
            kind=trace.SpanKind.SERVER,
            attributes={"rpc.system": "grpc", "rpc.method": method},
            start_time=_epoch(began),
        )
        if not span.get_span_context().trace_flags.sampled:
            return None
        return CallSpans(self._calls, span, began)

    def batch(self, layer: str, rows: int, calls: Sequence[str], trace: BatchTrace) -> BatchTrace:
        """See `Tracer.batch`."""
        span = self._batches.start_span(
            "batch",
            context=NOTHING,
            attributes={"qlinear.layer": layer, "qlinear.rows": rows},
            links=[_link(call) for call in calls],
            start_time=_epoch(trace.began),
        )
        span.end(_epoch(trace.ended))
        return trace._replace(traceparent=_traceparent(span))

    def close(self) -> None:
        """See `Tracer.close`."""
        # Left alone it tries for half a minute to reach a collector that is away.
        ending = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)


class CallSpans:
    """The span of one call, and those in it.

    Args:
        tracer: makes spans.
        span: of the call.
        began: seconds.
    """

    def __init__(self, tracer: trace.Tracer, span: trace.Span, began: float) -> None:
        self._tracer = tracer
        self._span = span
        self._began = began
        self._inside = trace.set_span_in_context(span, NOTHING)
        self.trace_id = trace.format_trace_id(span.get_span_context().trace_id)
        self.traceparent = _traceparent(span)

    def answered(self, outcomes: Sequence[TracedOutcome], began: float, ended: float) -> None:
        """See `CallTrace.answered`."""
        computed = [outcome for outcome in outcomes if outcome.batches]
        entries = [one.batches[0].began - one.queue_nanoseconds / 1e9 for one in computed]
        self._child("receive", self._began, min(entries, default=began))
        for outcome, entered in zip(computed, entries, strict=True):
            self._child("queue", entered, outcome.batches[0].began, outcome.batches[0])
            for batch in outcome.batches:
                self._steps(batch)
        self._child("reply", began, ended)

    def end(self, code: str) -> None:
        """See `CallTrace.end`."""
        self._span.set_attribute("rpc.response.status_code", code)
        if code != "OK":
            self._span.set_status(trace.StatusCode.ERROR, code)
        self._span.end()

    def _steps(self, batch: BatchTrace) -> None:
        """Show copies and kernel of a batch: as long as they were measured, in their order.

        Those up to the kernel begin with the batch, those behind it end with the batch.
        """
        before = [one for one in batch.transfers if one[0] not in AFTER_KERNEL]
        after = [one for one in batch.transfers if one[0] in AFTER_KERNEL]
        at = batch.began
        for direction, nanoseconds in before:
            at = self._step("transfer", at, nanoseconds, batch, {"qlinear.direction": direction})
        if batch.kernel_nanoseconds:
            self._step("kernel", at, batch.kernel_nanoseconds, batch, {})
        at = batch.ended - sum(nanoseconds for _, nanoseconds in after) / 1e9
        for direction, nanoseconds in after:
            at = self._step("transfer", at, nanoseconds, batch, {"qlinear.direction": direction})

    def _step(
        self, name: str, at: float, nanoseconds: int, batch: BatchTrace, more: dict[str, str]
    ) -> float:
        """Show one step and return when it ended."""
        end = at + nanoseconds / 1e9
        self._child(name, at, end, batch, more)
        return end

    def _child(
        self,
        name: str,
        began: float,
        ended: float,
        batch: BatchTrace | None = None,
        more: dict[str, str] | None = None,
    ) -> None:
        links = None if batch is None else [_link(batch.traceparent)]
        child = self._tracer.start_span(
            name,
            context=self._inside,
            attributes=more,
            links=links,
            start_time=_epoch(began),
        )
        child.end(_epoch(ended))


def _provider(sampler: Any, processor: SpanProcessor) -> TracerProvider:
    resource = Resource.create({SERVICE_NAME: "qlinear", SERVICE_VERSION: __version__})
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


def _epoch(seconds: float) -> int:
    """Return nanoseconds since 1970 for a time of the event loop's clock."""
    return round(seconds * 1e9) + time.time_ns() - time.monotonic_ns()


def _context(traceparent: str | None, tracestate: str) -> Context:
    if traceparent is None:
        return NOTHING
    return W3C.extract({"traceparent": traceparent, "tracestate": tracestate}, NOTHING)


def _link(traceparent: str) -> trace.Link:
    return trace.Link(trace.get_current_span(_context(traceparent, "")).get_span_context())


def _traceparent(span: trace.Span) -> str:
    carrier: dict[str, str] = {}
    W3C.inject(carrier, trace.set_span_in_context(span, NOTHING))
    return carrier["traceparent"]
