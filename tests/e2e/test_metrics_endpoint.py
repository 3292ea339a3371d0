"""The metrics port of a running server: exact values after known traffic, and its manners."""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError

import grpc
import pytest
import torch
from measured_layers import Samples, names, samples_of, scrape, value
from metrics_process import OPENMETRICS, get, served, words
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from running_server import WAIT_SECONDS, K, Running, Start, small_layers
from stream_peer import open_stream

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_service.config import LimitsConfig
from qlinear_service.packed_writer import write_packed

ONES = torch.ones(3, K).half()


@pytest.fixture
def observed(running: Running) -> Callable[[], Samples]:
    """What a scrape of the server in this process shows."""
    return lambda: scrape(running.server.metrics)


async def test_known_traffic_is_counted_exactly(
    running: Running, observed: Callable[[], Samples]
) -> None:
    await running.matmul("one/up", ONES)
    await running.matmul("up", ONES[:1])
    await running.matmul(["one/up", "one/down"], ONES)
    samples = observed()

    def calls(layer: str) -> float:
        return value(samples, "qlinear_requests_total", method="MatMul", layer=layer, code="OK")

    assert calls("one/up") == 3
    assert calls("one/down") == 1
    up, down = (running.registry.resolve(name) for name in ("one/up", "one/down"))
    shape = {"shape": up.spec.shape}
    assert value(samples, "qlinear_request_seconds_count", method="MatMul", **shape) == 3
    assert value(samples, "qlinear_queue_seconds_count", **shape) == 3
    assert value(samples, "qlinear_batch_rows_sum", **shape) == 7
    assert value(samples, "qlinear_transfer_seconds_count", direction="slot") == 3
    assert value(samples, "qlinear_transfer_seconds_count", direction="gather") == 4
    assert value(samples, "qlinear_reply_seconds_count") == 3
    for layer, rows, launches in ((up, 6, 2), (down, 3, 1)):
        stored = [layer.qweight, layer.scales]
        weights = sum(t.numel() * t.element_size() for t in stored)
        moved = launches * weights + rows * 2 * (layer.spec.k + layer.spec.n)
        labels = {"shape": layer.spec.shape, "m": "8", "device": "cpu"}
        assert value(samples, "qlinear_kernel_bytes_total", **labels) == moved
        assert value(samples, "qlinear_kernel_seconds_count", **labels) == launches
    assert value(samples, "qlinear_ready") == 1
    assert value(samples, "qlinear_layers_loaded") == len(running.registry)
    assert value(samples, "qlinear_inflight_bytes") == 0


async def test_what_waits_is_shown_while_it_waits(
    running: Running, observed: Callable[[], Samples]
) -> None:
    held = await running.hold()
    waiting = asyncio.create_task(running.matmul("one/down", ONES))
    await running.until_queued(3)
    samples = observed()
    assert value(samples, "qlinear_queue_rows", layer="one/down") == 3
    assert value(samples, "qlinear_inflight_bytes") == 2048
    running.kernels.gate.set()
    await asyncio.gather(held, waiting)
    assert value(observed(), "qlinear_queue_rows", layer="one/down") == 0


async def test_refusals_have_their_layer_code_and_reason(start: Start) -> None:
    running = await start(limits=LimitsConfig(max_request_rows=4, max_queue_rows=4))
    for request in (
        running.request("up", torch.ones(5, K).half()),
        running.request("one/up", torch.ones(1, 7).half()),
        running.request("down", ONES),
        running.request("nothing", ONES),
        pb.MatMulRequest(),
    ):
        await running.refused(request)
    held = await running.hold()
    waiting = asyncio.create_task(running.matmul("up", ONES))
    await running.until_queued(3)
    await running.refused(running.request("up", ONES))
    late = await running.refused(running.request("up", ONES[:1]), timeout=0.1)
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    left = asyncio.create_task(running.matmul("up", ONES[:1]))
    await running.until_queued(4)
    left.cancel()
    await running.until_queued(3)
    running.kernels.gate.set()
    await asyncio.gather(held, waiting)
    samples = scrape(running.server.metrics)

    def calls(layer: str, code: str) -> float:
        return value(samples, "qlinear_requests_total", method="MatMul", layer=layer, code=code)

    assert calls("one/up", "INVALID_ARGUMENT") == 1
    assert calls("unknown", "INVALID_ARGUMENT") == 1  # a bare name of two models
    assert calls("unknown", "NOT_FOUND") == 1
    assert calls("none", "INVALID_ARGUMENT") == 1
    assert calls("one/up", "RESOURCE_EXHAUSTED") == 2
    assert calls("one/up", "DEADLINE_EXCEEDED") == 1
    assert calls("one/up", "CANCELLED") == 1
    assert value(samples, "qlinear_rejected_total", reason="too_large") == 1
    assert value(samples, "qlinear_rejected_total", reason="queue_rows") == 1
    assert value(samples, "qlinear_expired_total") == 1
    assert value(samples, "qlinear_cancelled_total") == 1


async def test_streams_that_are_refused_are_counted(running: Running) -> None:
    """Without that a server that turns all streams away would look as if nobody asked."""

    async def ended(*messages: bytes) -> grpc.StatusCode:
        peer = open_stream(running)
        for message in messages:
            await peer.write(message)
        return (await peer.ended())[0]

    assert await ended(b"\xff\xff") is grpc.StatusCode.INVALID_ARGUMENT
    unnumbered = pb.StreamRequest(request_id=0, cancel=pb.Cancel()).SerializeToString()
    assert await ended(unnumbered) is grpc.StatusCode.INVALID_ARGUMENT
    running.server._lifecycle.begin_drain()
    assert await ended() is grpc.StatusCode.UNAVAILABLE
    samples = scrape(running.server.metrics)

    def streams(code: str) -> float:
        labels = {"method": "MatMulStream", "layer": "none", "code": code}
        return value(samples, "qlinear_requests_total", **labels)

    assert (streams("INVALID_ARGUMENT"), streams("UNAVAILABLE")) == (2, 1)
    assert value(samples, "qlinear_rejected_total", reason="not_serving") == 1
    assert streams("OK") == streams("CANCELLED") == 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    layers = [layer for layer in small_layers() if layer.spec.model == "one"]
    path = tmp_path / "one.safetensors"
    write_packed(path, "one", layers, specs=[layer.spec for layer in layers])
    return path


def request() -> pb.MatMulRequest:
    data = ONES.view(torch.uint8).numpy().tobytes()
    return pb.MatMulRequest(layer="up", x=pb.Tensor(dtype=1, shape=ONES.shape, data=data))


async def test_scrapes_under_load_parse_and_add_up(model: Path) -> None:
    async with served(model) as server, grpc.aio.insecure_channel(server.target) as channel:
        stub = pb_grpc.QuantizedLinearStub(channel)
        scraped: list[str] = []

        async def client() -> None:
            for _ in range(100):
                await stub.MatMul(request(), timeout=WAIT_SECONDS)

        async def scraper() -> None:
            while True:
                scraped.append((await asyncio.to_thread(get, server.metrics, "/metrics"))[0])
                await asyncio.to_thread(get, server.metrics, "/now.json")

        watching = asyncio.create_task(scraper())
        await asyncio.gather(*(client() for _ in range(8)))
        watching.cancel()
        counts = []
        for text in [*scraped, get(server.metrics, "/metrics")[0]]:
            samples = samples_of(text)
            labels = {"method": "MatMul", "layer": "one/up", "code": "OK"}
            counts.append(value(samples, "qlinear_requests_total", **labels))
        assert counts == sorted(counts)
        assert len(counts) > 2
        assert counts[-1] == 800
        assert {"qlinear_roofline_ratio", "qlinear_hbm_peak_bytes_per_second"} <= names(samples)
        assert not any(name.endswith("_created") for name in names(samples))


async def test_formats_page_and_health(model: Path) -> None:
    async with served(model, "--torch-only") as server:
        text, kind = get(server.metrics, "/metrics", OPENMETRICS)
        assert kind.startswith("application/openmetrics-text; version=1.0.0")
        assert any(family.name == "qlinear_ready" for family in parse_openmetrics(text))
        assert get(server.metrics, "/metrics")[1].startswith("text/plain; version=0.0.4")
        page, kind = get(server.metrics, "/?at=once")
        assert kind == "text/html; charset=utf-8"
        assert "//" not in page.replace("<!doctype html>", "")
        document, kind = get(server.metrics, "/now.json")
        assert kind == "application/json"
        assert json.loads(document)["layers"][0]["name"] == "one/up"
        assert get(server.metrics, "/healthz")[0] == "serving\n"
        with pytest.raises(HTTPError, match="404"):
            get(server.metrics, "/etc/passwd")
        assert server.metrics.startswith("127.0.0.1:")
        # A client that connects and says nothing must not hold up the end.
        silent = socket.create_connection(("127.0.0.1", int(server.metrics.rpartition(":")[2])))
        server.process.terminate()
        assert await asyncio.wait_for(server.process.wait(), WAIT_SECONDS) == 0
        silent.close()


async def test_metrics_outlive_the_data_port_while_it_drains(model: Path) -> None:
    async with served(model, "--torch-only", "--drain-delay-seconds", "1") as server:
        server.process.terminate()
        states = []
        while server.process.returncode is None:
            try:
                samples = samples_of((await asyncio.to_thread(get, server.metrics, "/metrics"))[0])
            except OSError:
                break
            states.append(value(samples, "qlinear_ready"))
        await asyncio.wait_for(server.process.wait(), WAIT_SECONDS)
        assert states[-1] == 0, "nothing told that the server had left"


def test_a_taken_metrics_port_is_one_line_and_exit_1(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, *words(model, "--metrics-port", port)],
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"qlinear serve: cannot listen on 127.0.0.1:{port} for metrics: Address already in use; "
        "choose another port with --metrics-port, or -1 for no metrics"
    ]


@pytest.mark.slow
async def test_promtool_has_nothing_to_say(model: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    async with served(model) as server, grpc.aio.insecure_channel(server.target) as channel:
        await pb_grpc.QuantizedLinearStub(channel).MatMul(request(), timeout=WAIT_SECONDS)
        text, _ = get(server.metrics, "/metrics")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
