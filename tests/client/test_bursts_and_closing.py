"""First bursts ask the server once; closing at a bad moment gives a typed error or nothing."""

import asyncio
import threading
from typing import Any

import grpc
import numpy as np
import pytest

from qlinear_client import AsyncClient, Cancelled, Client
from qlinear_client._sync_stream import SyncStream

X = np.ones((1, 6), np.float32)


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_a_first_burst_of_tasks_asks_the_server_once(fake: Any, transport: str) -> None:
    async with AsyncClient(fake.target, transport=transport) as client:
        await asyncio.gather(*(client.matmul("toy/a", X) for _ in range(50)))
    assert fake.info_calls == 1


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_a_first_burst_of_threads_asks_the_server_once(fake: Any, transport: str) -> None:
    with Client(fake.target, transport=transport) as client:
        threads = [threading.Thread(target=client.matmul, args=("toy/a", X)) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert fake.info_calls == 1


async def test_closing_while_a_call_waits_for_its_next_attempt_is_cancelled() -> None:
    client = AsyncClient("127.0.0.1:1", max_retries=50, timeout=20, transport="unary")
    waiting = asyncio.create_task(client.server_info())
    await asyncio.sleep(0.3)
    await client.close()
    with pytest.raises(Cancelled, match="closed while the call waited"):
        await asyncio.wait_for(waiting, 10)


def test_a_stream_may_be_closed_by_the_thread_that_holds_its_lock() -> None:
    """As the garbage collector does, at any moment, with a client that nobody closed."""

    class OpenCall:
        ended = threading.Event()

        def __iter__(self) -> Any:
            self.ended.wait(20)
            return iter(())

        def cancel(self) -> None:
            self.ended.set()

        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.CANCELLED

        def details(self) -> str:
            return ""

    stream = SyncStream(lambda requests: OpenCall())
    closed = threading.Event()

    def close_inside() -> None:
        with stream._lock:
            stream.close()
        closed.set()

    threading.Thread(target=close_inside, daemon=True).start()
    assert closed.wait(5)
