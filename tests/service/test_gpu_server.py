"""A server over a device made of threads: what is counted, and what happens when it is lost."""

import asyncio
import time
from typing import Any

import grpc
import pytest
import torch
from fake_gpu import FakeGpu
from grpc_health.v1 import health_pb2, health_pb2_grpc
from measured_layers import scrape, value
from running_server import K, assert_close, decode, quick_config, small_layers

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_service import runners
from qlinear_service import server as server_module
from qlinear_service.config import BatchingConfig, KernelConfig, OptionError
from qlinear_service.errors import OutOfDeviceMemory
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.kernels import reference
from qlinear_service.kernels.backends import TorchKernels
from qlinear_service.layers import LayerRegistry
from qlinear_service.loaded import Loaded
from qlinear_service.server import Server

WAIT_SECONDS = 20
LAYERS = LayerRegistry(small_layers())
GAUGES = {("qlinear_gpu_clock_hertz",): 1.98e9, ("qlinear_gpu_throttled",): 0.0}


def loaded(gpu: FakeGpu) -> Loaded:
    return Loaded(
        registry=LAYERS,
        kernels=TorchKernels(),
        gpu=gpu,
        telemetry=lambda: GAUGES,
        tuned_bandwidths=(("k8_n8_b4_g128", 16, 3e12),),
    )


def config(**batching: Any) -> Any:
    return quick_config(kernels=KernelConfig(device="cuda:0"), batching=BatchingConfig(**batching))


def message(x: torch.Tensor) -> pb.MatMulRequest:
    data = x.view(torch.uint8).numpy().tobytes()
    return pb.MatMulRequest(layer="one/up", x=pb.Tensor(dtype=1, shape=x.shape, data=data))


class Left(Exception):
    """Instead of leaving the process."""


async def test_a_lost_device_ends_the_server_with_unavailable_and_not_serving(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Left

    monkeypatch.setattr(server_module, "_leave", leave)
    gpu, server, ready = FakeGpu(), Server(config()), asyncio.Event()
    port = await server.bind()
    running = asyncio.create_task(
        server_module._run(server, lambda stop: loaded(gpu), asyncio.Event(), ready.set)
    )
    await asyncio.wait_for(ready.wait(), WAIT_SECONDS)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub, seen = pb_grpc.QuantizedLinearStub(channel), []

        async def watch() -> None:
            request = health_pb2.HealthCheckRequest(service="readiness")
            async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
                seen.append(answer.status)

        watching = asyncio.create_task(watch())
        x = torch.randn(3, K).half()
        answer = await stub.MatMul(message(x), timeout=WAIT_SECONDS)
        assert_close(decode(answer.y[0]), reference.linear(LAYERS.resolve("one/up"), x))
        samples = scrape(server.metrics)
        shape = {"shape": LAYERS.resolve("one/up").spec.shape, "m": "8", "device": "cuda:0"}
        assert value(samples, "qlinear_kernel_busy_seconds_total", **shape) == 5e-6
        for direction in ("slot", "gather", "to_device", "from_device", "scatter"):
            count = value(samples, "qlinear_transfer_seconds_count", direction=direction)
            assert count == 1, direction
        assert value(samples, "qlinear_gpu_clock_hertz", device="cuda:0") == 1.98e9
        assert value(samples, "qlinear_weight_bytes", device="cuda:0") > 0
        tuned = {"shape": "k8_n8_b4_g128", "m": "16", "device": "cuda:0"}
        assert value(samples, "qlinear_tuned_bandwidth_bytes_per_second", **tuned) == 3e12

        gpu.lost = True
        calls = [stub.MatMul(message(x), timeout=WAIT_SECONDS) for _ in range(5)]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(Left):
            await asyncio.wait_for(running, WAIT_SECONDS)
        await asyncio.gather(watching, return_exceptions=True)
    assert codes == [1]
    serving = health_pb2.HealthCheckResponse
    assert seen[-2:] == [serving.SERVING, serving.NOT_SERVING]
    assert "device_lost" in caplog.text
    assert "engine_gone" in caplog.text


async def test_the_configured_number_of_batches_is_in_flight() -> None:
    gpu, server = FakeGpu(), Server(config(max_batches_in_flight=3))
    await server.bind()
    await server.load(lambda stop: loaded(gpu))
    assert server._batching is not None
    assert server._batching.batcher._in_flight.most == 3
    assert await server.drain()


async def test_a_device_without_room_for_buffers_is_an_error_of_loading() -> None:
    gpu, server = FakeGpu(), Server(config())
    gpu.memory_bytes = 1 << 20
    await server.bind()
    with pytest.raises(OutOfDeviceMemory, match="no room for the buffers of 2 batches"):
        await server.load(lambda stop: loaded(gpu))
    assert await server.abandon()


@pytest.mark.parametrize(("dispatcher", "chosen"), [("python", "batcher"), ("native", "native")])
def test_the_native_dispatcher_is_for_who_asks(
    dispatcher: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = object.__new__(GpuEngine)
    monkeypatch.setattr(runners, "new_runner", lambda *_: engine)
    monkeypatch.setattr(runners, "_dispatching", lambda *_: "native")
    monkeypatch.setattr(runners, "_python_batching", lambda *_, **__: "batcher")
    held: Any = loaded(object.__new__(CudaStreams))  # type: ignore[arg-type]
    nothing: Any = None
    found: Any = runners.new_batching(
        held, config(dispatcher=dispatcher), nothing, nothing, clock=time.monotonic, metrics=nothing
    )
    assert found == chosen


def test_an_unknown_dispatcher_is_refused() -> None:
    with pytest.raises(OptionError, match=r"dispatcher.*is 'both'; expected python, native"):
        BatchingConfig(dispatcher="both")
