"""Connections of a real server: pings, age, probes while it is busy, several event loops."""

import asyncio
import contextlib
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from grpc._cython import cygrpc
from running_server import K, Running, Start, assert_close, quick_config

from qlinear_client import AsyncClient, Unavailable, _config
from qlinear_service import server as server_module
from qlinear_service.channel import channel_options, max_stream_seconds
from qlinear_service.config import ServerConfig, ServiceConfig

X = torch.ones(2, K).half()
PING_INTERVAL = "grpc.http2.min_ping_interval_without_data_ms"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1


def options_with(monkeypatch: pytest.MonkeyPatch, **scaled: float) -> None:
    """Have servers open with the project's own options, some of them multiplied."""

    def changed(config: ServiceConfig) -> list[tuple[str, object]]:
        options = dict(channel_options(config))
        for name, factor in scaled.items():
            options[name] = round(options[name] * factor)
        return list(options.items())

    monkeypatch.setattr(server_module, "channel_options", changed)


def test_grpc_knows_every_option_that_is_set() -> None:
    """It ignores a name that it does not know, without a word."""
    library = Path(cygrpc.__file__).read_bytes()
    options = [*channel_options(ServiceConfig()), *_config.channel_options(1 << 20)]
    unknown = [name for name, _ in options if name.encode() + b"\0" not in library]
    assert not unknown


@pytest.mark.parametrize("seconds", [0.1, 2.0, 300.0])
def test_connections_live_as_long_as_asked_and_streams_are_never_cut_off(seconds: float) -> None:
    config = ServiceConfig(server=ServerConfig(max_connection_seconds=seconds))
    ages = set()
    for _ in range(20):
        options = dict(channel_options(config))
        ages.add(options["grpc.max_connection_age_ms"])
        assert options["grpc.max_connection_age_grace_ms"] >= 1000 * max_stream_seconds(seconds)
    assert min(ages) >= 900 * seconds
    assert max(ages) <= 1100 * seconds
    assert len(ages) > 1  # not all clients look for new servers at once
    assert max_stream_seconds(seconds) < 0.9 * seconds


def frame(kind: int, flags: int = 0, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2 for the connection itself."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + payload


async def pings_answered(port: int, count: int, every_seconds: float) -> int:
    """Keep a connection without calls alive; return how many pings came back before it ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered = 0

    async def read() -> None:
        nonlocal answered
        while True:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == GOAWAY:
                return
            answered += (head[3], head[4]) == (PING, ACK)
            if (head[3], head[4]) == (SETTINGS, 0):
                writer.write(frame(SETTINGS, ACK))

    reading = asyncio.create_task(read())
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
    for _ in range(count):
        writer.write(frame(PING, payload=bytes(8)))
        await asyncio.sleep(every_seconds)
        if reading.done():
            break
    reading.cancel()
    writer.close()
    await asyncio.gather(reading, writer.wait_closed(), return_exceptions=True)
    return answered


async def test_a_client_that_pings_every_ten_seconds_is_kept(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred times as fast. With gRPC's default of 300 s it would hang up at the fourth."""
    options_with(monkeypatch, **{PING_INTERVAL: 0.01})
    running = await start()
    assert await pings_answered(running.port, count=8, every_seconds=0.1) == 8


async def test_a_client_that_floods_with_pings_is_not_kept(running: Running) -> None:
    assert await pings_answered(running.port, count=20, every_seconds=0.02) < 20


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_connections_that_end_of_age_lose_nothing(start: Start, transport: str) -> None:
    """A thousand times as fast: each lives 0.3 s, and its streams 0.24 s."""
    running = await start(server_config=replace(quick_config().server, max_connection_seconds=0.3))
    expected = running.expected("one/up", X)
    target = f"127.0.0.1:{running.port}"
    async with AsyncClient(target, transport=transport, max_retries=0) as client:

        async def calls(end: float) -> int:
            count = 0
            while time.monotonic() < end:
                assert_close(await client.matmul("one/up", X), expected)
                count += 1
            return count

        end = time.monotonic() + 1.5
        counts = await asyncio.gather(*(calls(end) for _ in range(16)))
    assert min(counts) > 0


async def test_probes_are_answered_while_the_engine_is_stuck_and_calls_pour_in(
    running: Running,
) -> None:
    busy = await running.hold()
    flood = [asyncio.create_task(running.matmul("one/up", X)) for _ in range(500)]
    for name in ("liveness", "readiness", ""):
        assert await asyncio.wait_for(running.status(name), 5) == "SERVING"
    await running.until_queued(1000)
    started = time.monotonic()
    for name in ("liveness", "readiness", "startup"):
        assert await running.status(name) == "SERVING"
    assert time.monotonic() - started < 1  # the default timeout of a Kubernetes probe
    assert not busy.done()
    running.kernels.gate.set()
    await asyncio.gather(busy, *flood)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_a_server_that_was_away_for_long_is_soon_found_again(
    start: Start, transport: str
) -> None:
    """After 17 s of gRPC's own pauses, of 1, 1.6, 2.6, 4.1 and 6.6 s, the next one is 10 s."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    x = torch.ones(2, K).half()
    async with AsyncClient(f"127.0.0.1:{port}", transport=transport, max_retries=0) as client:
        with pytest.raises(Unavailable):
            await client.matmul("one/up", x)
        await asyncio.sleep(17)
        server = replace(quick_config().server, port=port)
        running = await start(server_config=server)
        back = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < back + 6:
            with contextlib.suppress(Unavailable):
                assert_close(await client.matmul("one/up", x), running.expected("one/up", x))
                return
            await asyncio.sleep(0.1)
        raise AssertionError("not found in 6 s")
