"""When calls end early, and when many run at once: deadlines, closing, cancelling, sharing."""

import asyncio
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from qlinear_client import AsyncClient, CallError, Cancelled, Client, DeadlineExceeded, Unavailable


def test_deadline_ends_a_call(connect: Any, fake: Any) -> None:
    fake.delay_seconds = 30
    x = np.ones((1, 6), np.float32)
    for client, timeout in (
        (connect(fake.target, timeout=0.3), {}),
        (connect(fake.target, timeout=None), {"timeout": 0.3}),
    ):
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.matmul("toy/a", x, **timeout)
        assert 0.25 < time.monotonic() - start < 5


def test_no_deadline_if_asked(connect: Any, fake: Any) -> None:
    fake.delay_seconds = 0.4
    client = connect(fake.target, timeout=0.2)
    x = np.ones((1, 6), np.float32)
    client.server_info(timeout=None)
    assert client.matmul("toy/a", x, timeout=None).shape == (1, 4)


def test_nobody_listens(connect: Any) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client = connect(f"127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(Unavailable) as caught:
            client.list_layers()
    assert caught.value.retryable
    assert caught.value.message


def test_a_closed_client_says_so(connect: Any, fake: Any) -> None:
    client = connect(fake.target)
    client.list_layers()
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="this client is closed"):
        client.list_layers()


def test_closing_ends_a_waiting_call_sync(fake: Any, transport: str) -> None:
    fake.delay_seconds = 30
    errors: list[CallError] = []

    def wait() -> None:
        try:
            client.matmul("toy/a", np.ones((1, 6), np.float32))
        except CallError as error:
            errors.append(error)

    with Client(fake.target, timeout=20, transport=transport) as client:
        thread = threading.Thread(target=wait)
        thread.start()
        assert fake.arrived.wait(10)
    thread.join(10)
    assert [type(error) for error in errors] == [Cancelled]


async def test_closing_ends_a_waiting_call_async(fake: Any, transport: str) -> None:
    fake.delay_seconds = 30
    async with AsyncClient(fake.target, timeout=20, transport=transport) as client:
        call = asyncio.create_task(client.matmul("toy/a", np.ones((1, 6), np.float32)))
        assert await asyncio.to_thread(fake.arrived.wait, 10)
    with pytest.raises(Cancelled):
        await call


@pytest.mark.parametrize("closes", [False, True])
async def test_cancelling_the_task_is_not_an_error_of_ours(
    fake: Any, transport: str, closes: bool
) -> None:
    fake.delay_seconds = 30
    async with AsyncClient(fake.target, timeout=20, transport=transport) as client:
        call = asyncio.create_task(client.matmul("toy/a", np.ones((1, 6), np.float32)))
        assert await asyncio.to_thread(fake.arrived.wait, 10)
        call.cancel()
        if closes:
            await client.close()
        with pytest.raises(asyncio.CancelledError):
            await call


def test_threads_share_a_client_and_get_their_own_answers(fake: Any, transport: str) -> None:
    rows = np.random.default_rng(3).integers(-9, 9, (32, 1, 6)).astype(np.float32)
    results: dict[int, np.ndarray] = {}
    with Client(fake.target, transport=transport) as client:

        def call(i: int) -> None:
            results[i] = client.matmul("toy/a", rows[i])

        threads = [threading.Thread(target=call, args=(i,)) for i in range(len(rows))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    for i, row in enumerate(rows):
        assert np.array_equal(results[i], row @ fake.layers["toy/a"].T)


async def test_tasks_share_a_client_and_get_their_own_answers(fake: Any, transport: str) -> None:
    rows = np.random.default_rng(4).integers(-9, 9, (32, 1, 6)).astype(np.float32)
    async with AsyncClient(fake.target, transport=transport) as client:
        results = await asyncio.gather(*(client.matmul("toy/b", row) for row in rows))
    for row, y in zip(rows, results, strict=True):
        assert np.array_equal(y, row @ fake.layers["toy/b"].T)


def test_clients_in_several_event_loops_get_their_own_answers(fake: Any, transport: str) -> None:
    """All loops of a process share grpc.aio's one poller (grpc/grpc#25364).

    Each wakes for the others' events and hands its exception handler a BlockingIOError if it comes
    too late, or a RuntimeError if the other loop has closed. That is noise of grpc's; every answer
    must be there, and nothing else may be reported.
    """
    rows = np.random.default_rng(5).integers(-9, 9, (3, 100, 1, 6)).astype(np.float32)
    results: dict[int, list[np.ndarray]] = {}
    reported: list[str] = []

    async def calls(number: int) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context["message"]))
        async with AsyncClient(fake.target, timeout=30, transport=transport) as client:
            waiting = [client.matmul("toy/a", row) for row in rows[number]]
            results[number] = await asyncio.gather(*waiting)

    threads = [threading.Thread(target=lambda i=i: asyncio.run(calls(i))) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for i, own in enumerate(rows):
        for row, y in zip(own, results[i], strict=True):
            assert np.array_equal(y, row @ fake.layers["toy/a"].T)
    assert [text for text in reported if "PollerCompletionQueue._handle_events" not in text] == []
