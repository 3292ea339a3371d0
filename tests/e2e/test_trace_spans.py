"""Spans of real calls, in memory: what they hold, whose they are, and when there are none."""

import asyncio
from collections.abc import Sequence

import grpc
import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from running_server import WAIT_SECONDS, K, Running, Start, decode
from stream_peer import open_stream

from qlinear_service.config import BatchingConfig
from qlinear_service.spans import SpanTracer

X = torch.ones(2, K).half()
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
KEPT, NOT_KEPT = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
STEPS = ["receive", "queue", "transfer", "kernel", "reply"]


class Traced:
    """A server that is traced, and its spans."""

    def __init__(self, running: Running, exporter: InMemorySpanExporter) -> None:
        self.running = running
        self.exporter = exporter

    def spans(self, name: str) -> list[ReadableSpan]:
        """Those that have ended, of this name, in the order in which they began."""
        found = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return sorted(found, key=lambda span: span.start_time or 0)

    def calls(self, method: str) -> list[ReadableSpan]:
        return self.spans(f"qlinear.v1.QuantizedLinear/{method}")

    def inside(self, call: ReadableSpan) -> list[ReadableSpan]:
        """The children of a span, in their order."""
        spans = self.exporter.get_finished_spans()
        found = [one for one in spans if one.parent and one.parent.span_id == span_id(call)]
        return sorted(found, key=lambda span: span.start_time or 0)

    async def call(self, *metadata: tuple[str, str], layers: str | Sequence[str] = "up") -> None:
        stub, request = self.running.stub, self.running.request(layers, X)
        await stub.MatMul(request, timeout=WAIT_SECONDS, metadata=metadata)


def span_id(span: ReadableSpan) -> int:
    return span.get_span_context().span_id


def trace_id(span: ReadableSpan) -> str:
    return f"{span.get_span_context().trace_id:032x}"


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


@pytest.fixture
def ratio() -> float:
    """Of calls that say nothing of a trace."""
    return 0.0


@pytest.fixture
async def traced(start: Start, ratio: float) -> Traced:
    exporter = InMemorySpanExporter()
    tracer = SpanTracer(SimpleSpanProcessor(exporter), ratio)
    return Traced(await start(tracer=tracer), exporter)


def assert_steps(traced: Traced, call: ReadableSpan, batch: ReadableSpan) -> None:
    """The five steps of a call of one layer, in order, within it, linked to their batch."""
    steps = traced.inside(call)
    assert [step.name for step in steps] == STEPS
    assert call.start_time is not None
    assert call.end_time is not None
    ends = call.start_time
    for step in steps:
        assert trace_id(step) == trace_id(call)
        assert step.start_time is not None
        assert step.end_time is not None
        # Clocks of floats: a microsecond may be lost between one step and the next.
        assert ends - 1000 <= step.start_time <= step.end_time <= call.end_time + 1000
        ends = step.end_time
        expected = [] if step.name in ("receive", "reply") else [span_id(batch)]
        assert linked(step) == expected, step.name
    assert batch.start_time is not None
    assert batch.end_time is not None
    queue, kernel = steps[1], steps[3]
    assert abs((queue.end_time or 0) - batch.start_time) < 1_000_000
    assert (kernel.end_time or 0) <= batch.end_time + 1000


async def test_a_unary_call_and_its_batch(traced: Traced) -> None:
    await traced.call(("traceparent", KEPT), ("tracestate", "vendor=1"))
    (call,), (batch,) = traced.calls("MatMul"), traced.spans("batch")
    assert trace_id(call) == TRACE
    assert call.parent is not None
    assert f"{call.parent.span_id:016x}" == PARENT
    assert call.parent.is_remote
    assert call.get_span_context().trace_state.get("vendor") == "1"
    assert call.kind is SpanKind.SERVER
    assert call.attributes is not None
    assert call.attributes["rpc.response.status_code"] == "OK"
    assert call.status.status_code is StatusCode.UNSET
    assert_steps(traced, call, batch)
    # The batch belongs to no call's trace and is linked to all of its calls.
    assert batch.parent is None
    assert trace_id(batch) != TRACE
    assert linked(batch) == [span_id(call)]
    assert dict(batch.attributes or {}) == {"qlinear.layer": "one/up", "qlinear.rows": 2}
    assert call.resource.attributes["service.name"] == "qlinear"


async def test_calls_that_share_a_batch_are_linked_to_it(traced: Traced) -> None:
    held = await traced.running.hold("one/down")
    calls = [
        asyncio.create_task(traced.call(("traceparent", parent)))
        for parent in (KEPT, KEPT.replace("4bf9", "5bf9"), NOT_KEPT)
    ]
    await traced.running.until_queued(6)
    traced.running.kernels.gate.set()
    await asyncio.gather(held, *calls)
    shown = traced.calls("MatMul")
    assert sorted(map(trace_id, shown)) == [TRACE, TRACE.replace("4bf9", "5bf9")]
    (batch,) = traced.spans("batch")
    assert sorted(linked(batch)) == sorted(map(span_id, shown))
    assert (batch.attributes or {})["qlinear.rows"] == 6
    for call in shown:
        assert_steps(traced, call, batch)


async def test_calls_of_a_stream(traced: Traced) -> None:
    peer = open_stream(traced.running)
    await peer.send(1, "one/up", X, traceparent=KEPT)
    await peer.result(1)
    await peer.send(2, "one/up", X)
    await peer.result(2)
    (call,), (batch,) = traced.calls("MatMulStream"), traced.spans("batch")
    assert trace_id(call) == TRACE
    assert_steps(traced, call, batch)


async def test_a_streams_own_context_is_that_of_its_calls(traced: Traced) -> None:
    other = KEPT.replace(PARENT, "1111111111111111").replace("4bf9", "5bf9")
    metadata = (("traceparent", KEPT), ("tracestate", "vendor=1"))
    peer = open_stream(traced.running, metadata=metadata)
    for number, text in enumerate(["", other, "nonsense", NOT_KEPT], 1):
        await peer.send(number, "one/up", X, traceparent=text)
        await peer.result(number)
    calls = traced.calls("MatMulStream")
    found = [trace_id(call) for call in calls]
    # Of the fourth its caller says that it is not kept.
    assert found == [TRACE, trace_id_of(other), TRACE]
    states = [call.get_span_context().trace_state.get("vendor") for call in calls]
    assert states == ["1", None, "1"]  # tracestate belongs to the traceparent beside it


def trace_id_of(traceparent: str) -> str:
    return traceparent.split("-")[1]


async def test_each_layer_of_a_call_has_its_steps(traced: Traced) -> None:
    await traced.call(("traceparent", KEPT), layers=["one/up", "one/down"])
    (call,) = traced.calls("MatMul")
    names = sorted(step.name for step in traced.inside(call))
    assert names == sorted(["receive", "reply", *["queue", "transfer", "kernel"] * 2])
    batches = traced.spans("batch")
    assert {(batch.attributes or {})["qlinear.layer"] for batch in batches} == {
        *("one/up", "one/down")
    }
    assert {id for batch in batches for id in linked(batch)} == {span_id(call)}


async def test_failures_have_their_status_and_no_answer(traced: Traced) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await traced.call(("traceparent", KEPT), layers="nothing")
    stub, x = traced.running.stub, torch.full((1, K), 13.0).half()
    metadata = (("traceparent", KEPT),)
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.MatMul(traced.running.request("up", x), timeout=20, metadata=metadata)
    peer = open_stream(traced.running)
    await peer.send(1, "nothing", X, traceparent=KEPT)
    await peer.read()
    found = [
        ((call.attributes or {})["rpc.response.status_code"], call.status.status_code)
        for call in [*traced.calls("MatMul"), *traced.calls("MatMulStream")]
    ]
    codes = ["NOT_FOUND", "INTERNAL", "NOT_FOUND"]
    assert found == [(code, StatusCode.ERROR) for code in codes]
    assert not traced.spans("reply")


@pytest.mark.parametrize(("ratio", "traces"), [(0.0, 0), (1.0, 2)])
async def test_calls_without_a_context_are_sampled_by_the_ratio(
    traced: Traced, traces: int
) -> None:
    await traced.call()
    await traced.call(("traceparent", "nonsense"))
    await traced.call(("traceparent", NOT_KEPT))
    calls = traced.calls("MatMul")
    assert len(calls) == traces
    assert all(call.parent is None for call in calls)
    assert len(traced.spans("batch")) == traces


async def test_an_exemplar_names_the_trace_that_shows_the_call(
    traced: Traced, start: Start
) -> None:
    """With a tracer that of its span, without one that of its caller."""
    await traced.call(("traceparent", KEPT))
    untraced = Traced(await start(), InMemorySpanExporter())
    await untraced.call(("traceparent", KEPT))
    await untraced.call(("traceparent", NOT_KEPT.replace("4bf9", "5bf9")))
    peer = open_stream(untraced.running)
    await peer.send(1, "one/up", X, traceparent=KEPT)
    await peer.result(1)
    for one, methods in ((traced, ["MatMul"]), (untraced, ["MatMul", "MatMulStream"])):
        families = one.running.server.metrics.families
        found = {
            labels[0]: [exemplar.labels for exemplar in histogram.exemplars.values()]
            for labels, histogram in families["qlinear_request_seconds"].histograms.items()
        }
        assert found == {method: [{"trace_id": TRACE}] for method in methods}


async def test_a_split_call_shows_every_batch(start: Start) -> None:
    exporter = InMemorySpanExporter()
    tracer = SpanTracer(SimpleSpanProcessor(exporter), 0.0)
    running = await start(batching=BatchingConfig(max_batch_rows=2), tracer=tracer)
    traced = Traced(running, exporter)
    x = torch.ones(5, K).half()
    response = await running.stub.MatMul(
        running.request("up", x), timeout=WAIT_SECONDS, metadata=(("traceparent", KEPT),)
    )
    assert decode(response.y[0]).shape == (5, 40)
    (call,) = traced.calls("MatMul")
    batches = traced.spans("batch")
    assert [(batch.attributes or {})["qlinear.rows"] for batch in batches] == [2, 2, 1]
    kernels = [step for step in traced.inside(call) if step.name == "kernel"]
    assert [linked(kernel) for kernel in kernels] == [[span_id(batch)] for batch in batches]
    assert len([step for step in traced.inside(call) if step.name == "queue"]) == 1
