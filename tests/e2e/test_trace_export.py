"""Spans on their way out of a real server: to a collector that is there, to one that is not."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from metrics_process import served
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc
from running_server import K, small_layers

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_service.commands.serve import _tracer
from qlinear_service.config_tracing import TracingConfig
from qlinear_service.errors import ConfigError
from qlinear_service.packed_writer import write_packed

WAIT_SECONDS = 30
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
METADATA = (("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"),)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = [one for one in small_layers() if one.spec.model == "one"]
    path = tmp_path_factory.mktemp("small") / "one.safetensors"
    write_packed(path, "one", layers, specs=[one.spec for one in layers])
    return path


class Collector(collector_grpc.TraceServiceServicer):
    """Keeps the names and trace ids of what it is sent."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []
        self.came = threading.Event()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [(span.name, span.trace_id.hex()) for span in scope.spans]
        self.came.set()
        return collector_pb.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    servicer, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    collector_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


async def call(target: str) -> None:
    x = torch.ones(2, K).half()
    data = x.view(torch.uint8).numpy().tobytes()
    request = pb.MatMulRequest(layer="up", x=pb.Tensor(dtype=1, shape=x.shape, data=data))
    async with grpc.aio.insecure_channel(target) as channel:
        stub = pb_grpc.QuantizedLinearStub(channel)
        assert (await stub.MatMul(request, timeout=WAIT_SECONDS, metadata=METADATA)).y


async def test_a_server_that_ends_has_sent_its_spans(
    model: Path, collector: tuple[Collector, str]
) -> None:
    servicer, endpoint = collector
    async with served(model, "--torch-only", "--trace-endpoint", endpoint) as server:
        await call(server.target)
    assert servicer.came.wait(WAIT_SECONDS)
    found = {name for name, trace_id in servicer.spans if trace_id == TRACE}
    steps = {"receive", "queue", "transfer", "kernel", "reply"}
    assert found == steps | {"qlinear.v1.QuantizedLinear/MatMul"}
    assert "batch" in {name for name, trace_id in servicer.spans if trace_id != TRACE}


async def test_a_collector_that_is_away_costs_no_call_and_no_end(model: Path) -> None:
    words = ("--torch-only", "--trace-endpoint", "http://127.0.0.1:9")
    async with served(model, *words) as server:
        await call(server.target)


def test_what_cannot_be_used_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"trace_endpoint: is 'collector:4317'; expected a URL"):
        TracingConfig(trace_endpoint="collector:4317")
    with pytest.raises(ConfigError, match=r"trace_ratio: is 1\.5; expected 0 to 1"):
        TracingConfig(trace_ratio=1.5)
    assert _tracer(TracingConfig()) is None
    monkeypatch.delitem(sys.modules, "qlinear_service.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"pip install 'qlinear\[tracing\]'"):
        _tracer(TracingConfig(trace_endpoint="http://127.0.0.1:4317"))
