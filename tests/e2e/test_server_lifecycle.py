"""Starting, draining and ending: what callers and health are told at each step."""

import asyncio
import os
import signal
import threading
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from running_server import (
    WAIT_SECONDS,
    K,
    Running,
    Start,
    WatchedKernels,
    assert_close,
    quick_config,
    small_layers,
)

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_service.batcher import Batcher
from qlinear_service.errors import ConfigError
from qlinear_service.layers import LayerRegistry
from qlinear_service.loading import Loaded
from qlinear_service.server import Server, serve

Code = grpc.StatusCode
X = torch.ones(2, K).half()


async def test_while_starting_all_is_unavailable_but_health_answers(start: Start) -> None:
    running = await start(load=False)
    for name in ("", "startup", "readiness", "qlinear.v1.QuantizedLinear"):
        assert await running.status(name) == "NOT_SERVING"
    assert await running.status("liveness") == "SERVING"
    error = await running.refused(running.request("one/up", X))
    assert error.code() is Code.UNAVAILABLE
    assert "starting" in error.details()
    for call in (
        running.stub.ListLayers(pb.ListLayersRequest()),
        running.stub.GetServerInfo(pb.GetServerInfoRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is Code.UNAVAILABLE
    await running.load()
    for name in ("", "startup", "readiness", "liveness", "qlinear.v1.QuantizedLinear"):
        assert await running.status(name) == "SERVING"
    await running.lives_on()


async def test_draining_finishes_what_is_in_and_refuses_the_rest(start: Start) -> None:
    running = await start()
    busy = await running.hold()
    waiting = asyncio.create_task(running.matmul("one/up", X))
    await running.until_queued(2)
    drain = asyncio.create_task(running.server.drain())
    while await running.status("readiness") == "SERVING":
        await asyncio.sleep(0)
    assert await running.status("liveness") == "SERVING"
    assert await running.status("startup") == "SERVING"
    error = await running.refused(running.request("one/up", X))
    assert error.code() is Code.UNAVAILABLE
    assert "shutting down" in error.details()
    running.kernels.gate.set()
    (y,) = await waiting
    assert_close(y, running.expected("one/up", X))
    await busy
    assert await drain


async def test_during_the_drain_delay_calls_are_still_served(start: Start) -> None:
    server_config = replace(quick_config().server, drain_delay_seconds=0.3)
    running = await start(server_config=server_config)
    drain = asyncio.create_task(running.server.drain())
    while await running.status("") == "SERVING":
        await asyncio.sleep(0)
    await running.lives_on()
    assert await drain


async def test_what_outlives_the_grace_gets_unavailable(start: Start) -> None:
    server_config = replace(quick_config().server, grace_seconds=0.1)
    running = await start(server_config=server_config)
    running.kernels.gate.clear()
    calls = [
        asyncio.create_task(running.refused(running.request("one/up", x)))
        for x in (X, X, X.float())
    ]
    await running.entered()
    drain = asyncio.create_task(running.server.drain())
    for error in await asyncio.gather(*calls):
        assert error.code() is Code.UNAVAILABLE
    # The computation itself did not end in time, and drain says so.
    assert not await drain


async def test_a_taken_port_is_one_clear_error(running: Running) -> None:
    config = quick_config()
    second = Server(replace(config, server=replace(config.server, port=running.port)))
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:"):
        await second.bind()
    await second.abandon()


async def test_a_loader_that_fails_leaves_a_server_that_can_be_stopped(start: Start) -> None:
    running = await start(load=False)

    def broken(_stop: threading.Event) -> Any:
        raise ConfigError("nothing there")

    with pytest.raises(ConfigError, match="nothing there"):
        await running.server.load(broken)
    assert await running.status("readiness") == "NOT_SERVING"
    await asyncio.wait_for(running.server.abandon(), WAIT_SECONDS)


async def test_a_signal_while_loading_ends_it_with_0() -> None:
    entered = threading.Event()

    def loader(stop: threading.Event) -> Loaded:
        entered.set()
        assert stop.wait(WAIT_SECONDS)
        return Loaded(registry=LayerRegistry(), kernels=WatchedKernels())

    lines: list[str] = []
    running = asyncio.create_task(serve(quick_config(), loader, lines.append))
    assert await asyncio.to_thread(entered.wait, WAIT_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, WAIT_SECONDS) == 0
    assert [line.split()[0] for line in lines] == ["listening", "metrics"]


async def test_a_dead_batch_loop_ends_the_process_with_1(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits is told, and whoever starts processes sees that this one is broken."""

    async def run(self: Batcher) -> None:
        while not self.items_held:
            await asyncio.sleep(0)
        raise ZeroDivisionError("the loop is broken")

    monkeypatch.setattr(Batcher, "run", run)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def announce(line: str) -> None:
        if line.startswith("ready on "):
            ready.set_result(line.removeprefix("ready on "))

    def loader(_stop: threading.Event) -> Loaded:
        return Loaded(registry=LayerRegistry(small_layers()), kernels=WatchedKernels())

    running = asyncio.create_task(serve(quick_config(), loader, announce))
    async with grpc.aio.insecure_channel(await ready) as channel:
        data = X.view(torch.uint8).numpy().tobytes()
        x = pb.Tensor(dtype=pb.DTYPE_F16, shape=X.shape, data=data)
        stub: Any = pb_grpc.QuantizedLinearStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stub.MatMul(pb.MatMulRequest(layer="one/up", x=x))
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.wait_for(running, WAIT_SECONDS) == 1
    assert "the loop is broken" in caplog.text
