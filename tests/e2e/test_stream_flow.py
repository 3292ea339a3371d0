"""MatMulStream on a real server: clients that leave and clients that do not read."""

import asyncio
import logging
from typing import Any

import grpc
import pytest
import torch
from running_server import K, Running, Start
from stream_peer import PATH, open_stream, slab_of, until

from qlinear.v1 import linear_pb2 as pb
from qlinear_service.config import LimitsConfig

X = torch.ones(2, K).half()


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
async def test_a_client_that_leaves_frees_its_slots(
    running: Running, how: str, caplog: Any
) -> None:
    busy = await running.hold()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{running.port}")
    call = channel.stream_stream(PATH)()
    for number in range(1, 101):
        request = running.request("one/up", 7 * X)
        await call.write(pb.StreamRequest(request_id=number, call=request).SerializeToString())
    await running.until_queued(200)
    if how == "cancel":
        call.cancel()
    await channel.close()
    await running.until_queued(0)
    running.kernels.gate.set()
    await busy
    await until(lambda: slab_of(running).used_bytes == 0)
    await until(lambda: int(running.server._lifecycle.admitted) == 0)
    assert running.kernels.rows_seen() == [0]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_client_that_leaves_amid_answers_makes_no_noise(
    running: Running, caplog: Any
) -> None:
    async def leave() -> None:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{running.port}")
        call = channel.stream_stream(PATH)()
        for number in range(1, 51):
            request = running.request("one/up", X)
            await call.write(pb.StreamRequest(request_id=number, call=request).SerializeToString())
        await call.read()
        await channel.close()

    for _ in range(20):
        await leave()
    await until(lambda: int(running.server._lifecycle.admitted) == 0)
    await until(lambda: slab_of(running).used_bytes == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "limits",
    [LimitsConfig(max_stream_calls=8), LimitsConfig(max_stream_bytes=8 * 2000 * 40 * 2)],
    ids=["calls", "bytes"],
)
async def test_a_slow_reader_holds_bounded_memory(start: Start, limits: LimitsConfig) -> None:
    """1000 answers of 160 kB are asked for and none is read: most are never even computed."""
    running = await start(limits=limits)
    peer = open_stream(running)
    x = torch.ones(2000, K).half()
    sent = 0

    async def send() -> None:
        nonlocal sent
        for number in range(1, 1001):
            await peer.send(number, "one/up", x)
            sent = number

    sender = asyncio.create_task(send())
    before = -1
    while before != len(running.kernels.batches):
        before = len(running.kernels.batches)
        await asyncio.sleep(0.3)
    # 8 wait to be written; the rest has gone into the buffers of a connection.
    assert before < 100
    assert not sender.done()
    await running.lives_on()
    for _ in range(1000):
        assert (await peer.read()).WhichOneof("outcome") == "result"
    await sender
    assert slab_of(running).used_bytes == 0


async def test_invalid_calls_of_a_slow_reader_are_bounded_too(start: Start) -> None:
    running = await start(limits=LimitsConfig(max_stream_calls=4))
    peer = open_stream(running)
    busy = await running.hold()
    for number in range(1, 5):
        await peer.send(number, "one/up", X)
    await running.until_queued(8)
    await peer.write(pb.StreamRequest(request_id=5))
    # Held back, not refused: nothing is answered, nothing else is read.
    await peer.write(pb.StreamRequest(request_id=6))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(reading := asyncio.ensure_future(peer.read())), 0.2)
    running.kernels.gate.set()
    answers = [await reading, *[await peer.read() for _ in range(5)]]
    assert sorted(answer.request_id for answer in answers) == [1, 2, 3, 4, 5, 6]
    await busy


async def test_a_cancel_is_read_while_all_places_are_taken(start: Start) -> None:
    running = await start(limits=LimitsConfig(max_stream_calls=2))
    peer = open_stream(running)
    busy = await running.hold()
    await peer.send(1, "one/up", X)
    await peer.send(2, "one/up", X)
    await running.until_queued(4)
    await peer.cancel(2)
    assert (await peer.error(2)).code == grpc.StatusCode.CANCELLED.value[0]
    running.kernels.gate.set()
    await peer.result(1)
    await busy
