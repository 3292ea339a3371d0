"""What the scheduler promises, over real connections: shares, chunks, what is shown, endings."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import grpc
import pytest
import torch
from measured_layers import scrape, value
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
from service_curves import LINEAR, curve_of
from stream_peer import PATH, slab_of, until

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_service import server as server_module
from qlinear_service.config import BatchingConfig
from qlinear_service.layers import LayerRegistry
from qlinear_service.loading import Loaded
from qlinear_service.server import Server

X = torch.ones(2, K).half()
UP = "k96_n40_b4_g32"


def rows_of(number: float, rows: int = 1) -> torch.Tensor:
    return torch.full((rows, K), number).half()


@pytest.mark.parametrize("transport", ["unary", "stream"])
async def test_a_client_that_floods_the_queue_does_not_hold_up_another(
    start: Start, transport: str
) -> None:
    """By their ids, over one connection: 400 calls wait, and the 401st is among the first 100."""
    running = await start(batching=BatchingConfig(max_batch_rows=8))
    busy = await running.hold()

    async def call(client: str, number: float) -> None:
        metadata = (("qlinear-client-id", client),)
        request = running.request("one/up", rows_of(number))
        if transport == "unary":
            await running.stub.MatMul(request, metadata=metadata, timeout=WAIT_SECONDS)
            return
        stream = running.channel.stream_stream(PATH)(metadata=metadata)
        message = pb.StreamRequest(request_id=1, call=request)
        await stream.write(message.SerializeToString())
        await stream.read()
        await stream.done_writing()
        await stream.read()

    greedy = [asyncio.create_task(call("greedy", 1.0)) for _ in range(90)]
    if transport == "unary":
        greedy += [asyncio.create_task(call("greedy", 1.0)) for _ in range(310)]
    else:
        greedy.append(asyncio.create_task(running.matmul("one/up", rows_of(1.0))))
    await running.until_queued(len(greedy))
    polite = asyncio.create_task(call("polite", 2.0))
    await running.until_queued(len(greedy) + 1)
    running.kernels.gate.set()
    await asyncio.gather(busy, polite, *greedy)
    seen = running.kernels.rows_seen()
    assert len(seen) == len(greedy) + 2
    # In order of arrival it would be the last; it has to let one quantum pass.
    assert seen.index(2.0) < 70


async def test_a_large_call_is_overtaken_by_a_small_one_that_came_later(start: Start) -> None:
    """Both get their own rows, and the large one is computed in pieces that the curve asks for."""
    running = await start(curves={UP: LINEAR})
    busy = await running.hold()
    large = torch.arange(256).half().repeat(K, 1).T.contiguous() / 64
    first = asyncio.create_task(running.matmul("one/up", large))
    await running.until_queued(256)
    small = asyncio.create_task(running.matmul("two/down", rows_of(5.0)))
    await running.until_queued(257)
    running.kernels.gate.set()
    (y,), (z,) = await asyncio.gather(first, small)
    await busy
    assert_close(y, running.expected("one/up", large))
    assert_close(z, running.expected("two/down", rows_of(5.0)))
    names = [name for name, _ in running.kernels.batches]
    assert names.index("two/down") < len(names) - 4
    assert max(len(x) for _, x in running.kernels.batches) <= 32


async def test_sweet_spots_are_listed_and_shown(start: Start) -> None:
    curve = curve_of({1: 1e-5, 16: 1.05e-5, 64: 1.09e-5, 128: 4e-5})
    running = await start(curves={UP: curve})
    listed = await running.stub.ListLayers(pb.ListLayersRequest())
    found = {layer.name: layer.sweet_spot_rows for layer in listed.layers}
    assert found["one/up"] == 64
    assert found["one/down"] == 0  # not measured
    samples = scrape(running.server.metrics)
    labels = {"shape": UP, "device": "cpu"}
    assert value(samples, "qlinear_sweet_spot_rows", **labels) == 64


async def test_a_wedged_kernel_ends_the_process_and_every_call_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(server_module, "_leave", codes.append)
    monkeypatch.setattr(server_module, "LAST_WORDS_SECONDS", 0.2)
    kernels, ready = WatchedKernels(), asyncio.Event()
    kernels.gate.clear()
    registry = LayerRegistry(small_layers())
    server = Server(quick_config(batching=BatchingConfig(max_batch_seconds=0.2)))
    port = await server.bind()

    def loader(_stop: threading.Event) -> Loaded:
        return Loaded(registry=registry, kernels=kernels)

    ending = asyncio.create_task(server_module._run(server, loader, asyncio.Event(), ready.set))
    await ready.wait()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = pb_grpc.QuantizedLinearStub(channel)
        x = pb.Tensor(dtype=1, shape=X.shape, data=X.view(torch.uint8).numpy().tobytes())
        calls = [stub.MatMul(pb.MatMulRequest(layer="one/up", x=x)) for _ in range(20)]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(answer, grpc.aio.AioRpcError)
            assert answer.code() is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.wait_for(ending, WAIT_SECONDS) == 1
    assert codes == [1]
    kernels.gate.set()


CLIENT = """
import asyncio, sys
import numpy as np
from qlinear_client import AsyncClient

async def main(target, transport):
    async with AsyncClient(target, transport=transport, max_retries=0) as client:
        x = np.full((1, 96), 3, dtype=np.float16)
        calls = [asyncio.ensure_future(client.matmul("one/up", x)) for _ in range(50)]
        await asyncio.gather(*calls)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("transport", ["unary", "stream"])
async def test_a_client_that_is_killed_loses_its_own_calls_only(
    running: Running, transport: str
) -> None:
    busy = await running.hold()
    words = [sys.executable, "-c", CLIENT, f"127.0.0.1:{running.port}", transport]
    process = subprocess.Popen(words, env={**os.environ, "GRPC_VERBOSITY": "NONE"})
    try:
        await running.until_queued(50)
        mine = [asyncio.create_task(running.matmul("one/up", rows_of(n))) for n in range(20, 40)]
        await running.until_queued(70)
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait, WAIT_SECONDS)
        await running.until_queued(20)
    finally:
        process.kill()
        process.wait()
    running.kernels.gate.set()
    await busy
    for number, call in enumerate(mine, start=20):
        (y,) = await call
        assert_close(y, running.expected("one/up", rows_of(number)))
    assert 3.0 not in running.kernels.rows_seen()
    await until(lambda: slab_of(running).used_bytes == 0)
