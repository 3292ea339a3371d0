"""MatMulStream while servers leave: nothing is lost, and nobody waits for idle streams."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from running_server import WAIT_SECONDS, K, Start, assert_close, quick_config
from stream_peer import open_stream, slab_of, until

from qlinear_client import AsyncClient

Code = grpc.StatusCode
X = torch.ones(2, K).half()


async def test_draining_answers_what_was_sent_before_and_refuses_what_comes_later(
    start: Start,
) -> None:
    running = await start()
    peer, idle = open_stream(running), open_stream(running)
    busy = await running.hold()
    await until(lambda: int(running.server._lifecycle.admitted) == 3)
    await peer.send(1, "one/up", X)
    await running.until_queued(2)
    drain = asyncio.create_task(running.server.drain())
    await peer.going_away()
    await idle.going_away()
    assert await idle.ended() == (Code.OK, "")
    await peer.send(2, "one/up", X)
    error = await peer.error(2)
    assert error.code == Code.UNAVAILABLE.value[0]
    assert not drain.done()
    running.kernels.gate.set()
    (y,) = await peer.result(1)
    assert_close(y, running.expected("one/up", X))
    assert await peer.ended() == (Code.OK, "")
    await busy
    assert await drain


async def test_new_streams_are_refused_while_draining(start: Start) -> None:
    running = await start()
    busy = await running.hold()
    drain = asyncio.create_task(running.server.drain())
    while await running.status("readiness") == "SERVING":
        await asyncio.sleep(0)
    code, details = await open_stream(running).ended()
    assert code is Code.UNAVAILABLE
    assert "shutting down" in details
    running.kernels.gate.set()
    await busy
    assert await drain


async def test_during_the_drain_delay_streams_go_on(start: Start) -> None:
    server_config = replace(quick_config().server, drain_delay_seconds=0.3)
    running = await start(server_config=server_config)
    peer = open_stream(running)
    drain = asyncio.create_task(running.server.drain())
    while await running.status("") == "SERVING":
        await asyncio.sleep(0)
    await peer.lives_on()
    await peer.going_away()
    assert await peer.ended() == (Code.OK, "")
    assert await drain


async def test_a_thousand_idle_streams_do_not_hold_the_drain(start: Start) -> None:
    running = await start()
    peers = [open_stream(running) for _ in range(1000)]
    await asyncio.gather(*(peer.call.wait_for_connection() for peer in peers))
    await until(lambda: int(running.server._lifecycle.admitted) == 1000)
    ends = [asyncio.create_task(peer.going_away()) for peer in peers]
    begun = time.monotonic()
    assert await running.server.drain()
    assert time.monotonic() - begun < 10  # the grace period is longer
    await asyncio.gather(*ends)
    for peer in peers:
        assert await peer.ended() == (Code.OK, "")


async def test_what_outlives_the_grace_gets_unavailable(start: Start) -> None:
    server_config = replace(quick_config().server, grace_seconds=0.1)
    running = await start(server_config=server_config)
    running.kernels.gate.clear()
    peer = open_stream(running)
    await peer.send(1, "one/up", X)
    await running.entered()
    drain = asyncio.create_task(running.server.drain())
    await peer.going_away()
    assert (await peer.error(1)).code == Code.UNAVAILABLE.value[0]
    assert await peer.ended() == (Code.OK, "")
    assert not await drain  # the computation itself did not end in time


async def test_an_old_stream_is_asked_to_move_on(start: Start) -> None:
    """Connections have an age, and end without cutting off anything."""
    running = await start(server_config=replace(quick_config().server, max_connection_seconds=0.25))
    peer = open_stream(running)
    running.kernels.gate.clear()
    await peer.send(1, "one/up", X)
    await peer.going_away()
    await peer.send(2, "one/up", X)
    assert (await peer.error(2)).code == Code.UNAVAILABLE.value[0]
    running.kernels.gate.set()
    await peer.result(1)
    assert await peer.ended() == (Code.OK, "")
    await running.lives_on()


async def test_a_client_never_notices_that_its_streams_end(start: Start) -> None:
    running = await start(server_config=replace(quick_config().server, max_connection_seconds=0.12))
    expected = running.expected("one/up", X)
    async with AsyncClient(
        f"127.0.0.1:{running.port}", transport="stream", max_retries=0
    ) as client:

        async def calls(end: float) -> int:
            count = 0
            while time.monotonic() < end:
                assert_close(await client.matmul("one/up", X), expected)
                count += 1
            return count

        end = time.monotonic() + 1.5
        counts = await asyncio.gather(*(calls(end) for _ in range(32)))
    assert min(counts) > 0
    await until(lambda: slab_of(running).used_bytes == 0)


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_clients_of_two_servers_lose_nothing_when_one_drains(
    start: Start, transport: str
) -> None:
    """In one process, so that the moment of the drain is exact; a test with processes follows."""
    first, second = await start(), await start()
    target = f"ipv4:127.0.0.1:{first.port},127.0.0.1:{second.port}"
    expected = first.expected("one/up", X)
    stop = asyncio.Event()

    async def client(number: int) -> int:
        answered = 0
        async with AsyncClient(target, transport=transport, timeout=WAIT_SECONDS) as own:
            while not stop.is_set():
                calls = [own.matmul("one/up", X) for _ in range(number % 3 + 1)]
                for y in await asyncio.gather(*calls):
                    assert_close(y, expected)
                    answered += 1
        return answered

    clients = [asyncio.create_task(client(number)) for number in range(12)]
    await until(lambda: min(len(first.kernels.batches), len(second.kernels.batches)) > 20)
    assert await first.server.drain()
    before = len(second.kernels.batches)
    await until(lambda: len(second.kernels.batches) > before + 20)
    stop.set()
    counts: list[Any] = await asyncio.gather(*clients)
    assert min(counts) > 0
