"""A server over a device made of threads: what is counted, and what happens when it is lost."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

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
from qlinear_service.errors import BuildError, ConfigError, OutOfDeviceMemory
from qlinear_service.gpu import direct
from qlinear_service.gpu.engine import STAGES, GpuEngine
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.kernels import reference
from qlinear_service.kernels.backends import TorchKernels
from qlinear_service.layers import LayerRegistry
from qlinear_service.loaded import Loaded, Replica
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


class Chosen:
    """What brings calls together for a GPU that is made up, and how many batches it has."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.engine = object.__new__(GpuEngine)
        self.engine.sees_slab = True
        self.kept: list[int] = []
        patch.setattr(GpuEngine, "keep", lambda _, stages: self.kept.append(stages))
        self.gpu: Any = object.__new__(CudaStreams)
        self.gpu.kernels = SimpleNamespace(library="the library")
        self.known: list[object] = []
        self.stages = 0
        patch.setattr(runners, "new_runner", self._runner)
        patch.setattr(runners, "dispatching", self.known.append)
        patch.setattr(runners, "_dispatching", lambda *_: "native")
        patch.setattr(runners, "_python_batching", lambda *_: "python")

    def _runner(self, *_: object, stages: int) -> GpuEngine:
        self.stages = stages
        return self.engine

    def of(
        self, dispatcher: str, *, transfers: str = "auto", most: int = 0, **held: Any
    ) -> tuple[object, int]:
        made, nothing = replace(loaded(self.gpu), **held), cast(Any, None)
        batching = {} if dispatcher == "default" else {"dispatcher": dispatcher}
        asked = config(max_batches_in_flight=most, **batching)
        asked = replace(asked, kernels=replace(asked.kernels, transfers=transfers))
        found = runners.new_batching(
            made, asked, nothing, nothing, clock=time.monotonic, metrics=nothing
        )
        return found, self.stages


@pytest.mark.parametrize(
    ("dispatcher", "chosen"),
    [("default", "native"), ("auto", "native"), ("native", "native"), ("python", "python")],
)
def test_one_gpu_has_the_native_dispatcher_unless_told_otherwise(
    dispatcher: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Chosen(monkeypatch)
    assert made.of(dispatcher) == (chosen, direct.STAGES if chosen == "native" else STAGES)


def test_cpus_and_several_gpus_have_pythons_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Chosen(monkeypatch)
    replica = Replica("cuda:0", made.gpu, LAYERS)
    # One made of several is FakeGpu.
    for held in ({"gpu": None}, {"gpu": FakeGpu()}, {"replicas": (replica, replica)}):
        assert made.of("auto", **held) == ("python", STAGES)
        assert made.of("python", **held) == ("python", STAGES)
        with pytest.raises(ConfigError, match="native, which is for one GPU; expected auto or pyt"):
            made.of("native", **held)
    assert made.known == [], "there is nothing to ask the library for"


def test_kernels_that_do_not_see_the_slab_leave_python_its_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Chosen(monkeypatch)
    made.engine.sees_slab = False
    assert made.of("auto")[0] == "python"
    assert made.kept.pop() == STAGES, "no batch more in flight than Python's queue wants"
    assert made.of("auto", most=7)[0] == "python"
    assert made.kept.pop() == 7, "so many were asked for"
    assert made.of("native")[0] == "native", "it was asked for"
    assert made.kept == []
    assert made.of("auto", transfers="pinned") == ("python", STAGES), "no batch more in flight"
    assert made.of("native", transfers="pinned") == ("native", direct.STAGES)


def test_a_library_without_a_dispatcher_is_an_error_only_for_who_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Chosen(monkeypatch)

    def old(library: object) -> None:
        raise BuildError("the GPU kernels have no dispatcher: build them again")

    monkeypatch.setattr(runners, "dispatching", old)
    assert made.of("auto") == ("python", STAGES)
    (line,) = caplog.messages
    assert line.startswith("python_dispatches")
    assert "have no dispatcher" in line
    with pytest.raises(BuildError, match="have no dispatcher"):
        made.of("native")
    assert made.of("python") == ("python", STAGES)


def test_an_unknown_dispatcher_is_refused() -> None:
    with pytest.raises(OptionError, match=r"dispatcher.*is 'both'; expected auto, python, native"):
        BatchingConfig(dispatcher="both")
