"""Streams of both clients over real gRPC: replay, fallback, cancel, silence, one stream for all."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from qlinear.v1 import linear_pb2 as pb
from qlinear_client import AsyncClient, Client, DeadlineExceeded, NotFound, Unavailable

X = np.ones((1, 6), np.float32)
GOING_AWAY = pb.StreamResponse(going_away=pb.GoingAway())


@pytest.fixture
def transport() -> str:
    return "stream"


def test_all_calls_of_a_client_share_one_stream(connect: Any, fake: Any) -> None:
    client = connect(fake.target)
    for _ in range(5):
        client.matmul("toy/a", X)
    assert fake.streams_opened == 1
    assert [message.request_id for message in fake.messages] == [1, 2, 3, 4, 5]
    assert all(4e9 < message.timeout_nanoseconds <= 5e9 for message in fake.messages)


def test_an_error_of_one_call_keeps_the_stream(connect: Any, fake: Any) -> None:
    client = connect(fake.target)
    with pytest.raises(NotFound):
        client.matmul("toy/none", X)
    assert client.matmul("toy/a", X).shape == (1, 4)
    assert fake.streams_opened == 1


def test_a_server_without_streams_is_called_unary_from_then_on(connect: Any, fake: Any) -> None:
    fake.streams = False
    client = connect(fake.target, max_retries=0)
    # One stream is enough, unless grpc.aio hides its status behind that of a write that failed.
    for _ in range(20):
        assert client.matmul("toy/a", X).shape == (1, 4)
    opened = fake.streams_opened
    assert 1 <= opened < 20
    for _ in range(5):
        assert client.matmul("toy/a", X).shape == (1, 4)
    assert fake.streams_opened == opened


def test_what_a_leaving_server_did_not_answer_is_replayed(connect: Any, fake: Any) -> None:
    """It says so before it answers, answers one of two and closes; nobody notices."""

    def leave(requests: Any, context: Any) -> Iterator[pb.StreamResponse]:
        next(requests)
        fake.stream_script = None
        yield GOING_AWAY

    fake.stream_script = leave
    client = connect(fake.target, max_retries=0)
    assert np.array_equal(client.matmul("toy/a", X), X @ fake.layers["toy/a"].T)
    assert fake.streams_opened == 2


def test_after_going_away_calls_use_a_new_stream_while_the_old_one_still_answers(
    fake: Any,
) -> None:
    more = threading.Event()

    def answer_late(requests: Any, context: Any) -> Iterator[pb.StreamResponse]:
        first = next(requests)
        fake.stream_script = None
        yield GOING_AWAY
        assert more.wait(20)
        yield fake.streamed(first)

    fake.stream_script = answer_late

    async def calls() -> None:
        async with AsyncClient(fake.target, max_retries=0, transport="stream") as client:
            old = asyncio.create_task(client.matmul("toy/a", X))
            while fake.stream_script is not None:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert (await client.matmul("toy/b", X)).shape == (1, 4)
            assert not old.done()
            more.set()
            assert np.array_equal(await old, X @ fake.layers["toy/a"].T)
        assert fake.streams_opened == 2
        assert len(fake.requests) == 2

    asyncio.run(calls())


def test_a_broken_stream_is_replayed_as_often_as_asked(connect: Any, fake: Any) -> None:
    def broken(requests: Any, context: Any) -> Iterator[pb.StreamResponse]:
        next(requests)
        context.abort(grpc.StatusCode.UNAVAILABLE, "the cable is out")
        yield GOING_AWAY

    fake.stream_script = broken
    with pytest.raises(Unavailable, match="the cable is out"):
        connect(fake.target, max_retries=0).matmul("toy/a", X)
    assert fake.streams_opened == 1
    with pytest.raises(Unavailable, match="the cable is out"):
        connect(fake.target, max_retries=2).matmul("toy/a", X)
    assert fake.streams_opened == 4


def test_a_server_that_always_leaves_is_not_asked_in_a_hurry(connect: Any, fake: Any) -> None:
    def leave(requests: Any, context: Any) -> Iterator[pb.StreamResponse]:
        yield GOING_AWAY

    fake.stream_script = leave
    client = connect(fake.target)
    client.server_info()
    begun = time.monotonic()
    with pytest.raises((Unavailable, DeadlineExceeded)):
        client.matmul("toy/a", X, timeout=1.0)
    assert time.monotonic() - begun < 3
    assert fake.streams_opened < 12


def test_when_a_call_kills_the_stream_the_others_do_not_suffer(connect: Any, fake: Any) -> None:
    """Each is sent alone, and is told what is wrong with itself."""

    def refuse(requests: Any, context: Any) -> Iterator[pb.StreamResponse]:
        next(requests)
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max")
        yield GOING_AWAY

    fake.stream_script = refuse
    client = connect(fake.target, max_retries=0)
    assert client.matmul("toy/a", X).shape == (1, 4)
    with pytest.raises(NotFound):
        client.matmul("toy/none", X)
    fake.stream_script = None
    assert client.matmul("toy/a", X).shape == (1, 4)
    assert len(fake.messages) == 1  # streams are still used


def test_the_deadline_holds_even_if_the_server_stays_silent(connect: Any, fake: Any) -> None:
    quiet = threading.Event()

    def silent(requests: Any, context: Any) -> Iterator[pb.StreamResponse]:
        for message in requests:
            fake.messages.append(message)
        quiet.set()
        yield from ()

    fake.stream_script = silent
    client = connect(fake.target)
    client.server_info()
    begun = time.monotonic()
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"):
            client.matmul("toy/a", X, timeout=0.2)
    assert 0.4 <= time.monotonic() - begun < 5


def test_cancelling_the_task_sends_cancel(fake: Any) -> None:
    arrived, cancelled = threading.Event(), threading.Event()

    def script(requests: Any, context: Any) -> Iterator[pb.StreamResponse]:
        for message in requests:
            fake.messages.append(message)
            (cancelled if message.HasField("cancel") else arrived).set()
        yield from ()

    fake.stream_script = script

    async def cancel() -> None:
        async with AsyncClient(fake.target, transport="stream") as client:
            call = asyncio.create_task(client.matmul("toy/a", X))
            assert await asyncio.to_thread(arrived.wait, 10)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await asyncio.to_thread(cancelled.wait, 10)

    asyncio.run(cancel())
    first, second = fake.messages
    assert second == pb.StreamRequest(request_id=first.request_id, cancel=pb.Cancel())


def test_answers_out_of_order_reach_their_tasks(fake: Any) -> None:
    count = 40

    def backwards(requests: Any, context: Any) -> Iterator[pb.StreamResponse]:
        held = [next(requests) for _ in range(count)]
        yield from map(fake.streamed, reversed(held))

    fake.stream_script = backwards
    rows = np.random.default_rng(5).integers(-9, 9, (count, 1, 6)).astype(np.float32)

    async def calls() -> list[Any]:
        async with AsyncClient(fake.target, transport="stream") as client:
            return await asyncio.gather(*(client.matmul("toy/a", row) for row in rows))

    for row, y in zip(rows, asyncio.run(calls()), strict=True):
        assert np.array_equal(y, row @ fake.layers["toy/a"].T)


def test_a_client_that_nobody_closes_gives_its_stream_up(fake: Any) -> None:
    ended = threading.Event()

    def script(requests: Any, context: Any) -> Iterator[pb.StreamResponse]:
        context.add_callback(ended.set)
        yield fake.streamed(next(requests))
        for _ in requests:
            pass

    fake.stream_script = script
    client = Client(fake.target, transport="stream")
    client.matmul("toy/a", X)
    assert not ended.is_set()
    del client
    gc.collect()
    assert ended.wait(10)


@pytest.mark.parametrize(
    "program",
    [
        "client = Client({target!r}, transport='stream'); client.matmul('toy/a', x)",
        "client = AsyncClient({target!r}, transport='stream')\n"
        "asyncio.run(client.matmul('toy/a', x))",
    ],
    ids=["sync", "async"],
)
def test_a_program_that_forgets_to_close_ends_quietly(fake: Any, program: str) -> None:
    code = (
        "import asyncio\nimport numpy as np\nfrom qlinear_client import AsyncClient, Client\n"
        "x = np.ones((1, 6), np.float32)\n" + program.format(target=fake.target)
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
