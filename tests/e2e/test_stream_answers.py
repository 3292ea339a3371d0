"""MatMulStream on a real server: every id gets its own answer, in whatever order they finish."""

import asyncio

import grpc
import torch
from running_server import K, Running, Start, assert_close
from stream_peer import open_stream, slab_of, until

from qlinear.v1 import linear_pb2 as pb
from qlinear_service.config import BatchingConfig

X = torch.ones(2, K).half()


async def test_hundreds_in_flight_are_never_mixed_up(running: Running) -> None:
    """Every call has its own rows, layer and shape; nothing waits for anything else."""
    draw = torch.Generator().manual_seed(7)
    names = ["one/up", "one/down", "two/down"]
    calls = {
        number: (names[number % 3], torch.randn(number % 4 + 1, K, generator=draw).half())
        for number in range(1, 601)
    }
    peer = open_stream(running)

    async def send() -> None:
        for number, (name, x) in calls.items():
            await peer.send(number, name, x)

    sender = asyncio.create_task(send())
    seen: set[int] = set()
    for _ in calls:
        response = await peer.read()
        seen.add(response.request_id)
        name, x = calls[response.request_id]
        data = bytearray(response.result.y[0].data)
        y = torch.frombuffer(data, dtype=torch.half).view(x.shape[0], -1)
        assert_close(y, running.expected(name, x))
    await sender
    assert seen == set(calls)
    await peer.call.done_writing()
    assert await peer.ended() == (grpc.StatusCode.OK, "")
    assert max(x.shape[0] for _, x in running.kernels.batches) > 4  # they were batched
    assert slab_of(running).used_bytes == 0


async def test_answers_come_as_they_finish(start: Start) -> None:
    """An urgent call overtakes an older one: order of arrival is no promise."""
    running = await start(batching=BatchingConfig(max_batch_rows=2))
    peer = open_stream(running)
    busy = await running.hold()
    await peer.send(1, "one/down", X)
    await running.until_queued(2)
    request = running.request("one/up", X, priority=9)
    await peer.write(pb.StreamRequest(request_id=2, call=request))
    await running.until_queued(4)
    running.kernels.gate.set()
    (y,) = await peer.result(2)
    assert_close(y, running.expected("one/up", X))
    (y,) = await peer.result(1)
    assert_close(y, running.expected("one/down", X))
    await busy


async def test_several_layers_zero_rows_and_an_id_that_is_used_again(running: Running) -> None:
    peer = open_stream(running)
    await peer.send(5, ["one/up", "one/down"], X)
    up, down = await peer.result(5)
    assert_close(up, running.expected("one/up", X))
    assert_close(down, running.expected("one/down", X))
    await peer.send(5, ["one/up", "one/down"], torch.empty(0, K).half())
    assert [tuple(y.shape) for y in await peer.result(5)] == [(0, 40), (0, 24)]
    await peer.lives_on(5)


async def test_timings_only_if_wanted(running: Running) -> None:
    peer = open_stream(running)
    await peer.send(1, ["one/up", "one/down"], X, want_timing=True)
    response = await peer.read()
    assert [timing.layer for timing in response.result.timings] == ["one/up", "one/down"]
    for timing in response.result.timings:
        assert timing.batch_rows == 2
        assert 0 < timing.kernel_nanoseconds < timing.total_nanoseconds
        assert timing.queue_nanoseconds < timing.total_nanoseconds
    await peer.send(2, "one/up", X)
    assert not (await peer.read()).result.timings


async def test_a_stream_of_nothing_ends_well(running: Running) -> None:
    peer = open_stream(running)
    await peer.call.done_writing()
    assert await peer.ended() == (grpc.StatusCode.OK, "")
    await until(lambda: int(running.server._lifecycle.admitted) == 0)


async def test_streamed_calls_are_counted_like_unary_ones(running: Running) -> None:
    busy = await running.hold()
    gone, peer = open_stream(running), open_stream(running)
    await gone.send(1, "one/up", X)
    await running.until_queued(2)
    gone.call.cancel()
    await running.until_queued(0)
    running.kernels.gate.set()
    await busy
    await until(lambda: int(running.server._lifecycle.admitted) == 1)
    await peer.send(1, ["up", "one/down"], X)
    await peer.result(1)
    await peer.send(2, "one/nothing", X)
    assert (await peer.error(2)).code == grpc.StatusCode.NOT_FOUND.value[0]

    def counted(layer: str, code: str) -> float | None:
        labels = {"method": "MatMulStream", "layer": layer, "code": code}
        registry = running.server.metrics.registry
        return registry.get_sample_value("qlinear_requests_total", labels)

    assert counted("one/up", "OK") == 1
    assert counted("one/down", "OK") == 1
    assert counted("unknown", "NOT_FOUND") == 1
    assert counted("one/up", "CANCELLED") == 1
