"""Overload, deadlines, cancels and failures: who is told what, and what is never computed."""

import asyncio
import gc
import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from running_server import WAIT_SECONDS, K, Running, Start, assert_close, trailers
from stream_peer import until

from qlinear.v1 import linear_pb2 as pb
from qlinear_client import AsyncClient, ResourceExhausted, Unavailable
from qlinear_service.config import LimitsConfig
from qlinear_service.errors import RequestError
from qlinear_service.transport import LocalTransport

Code = grpc.StatusCode
X = torch.ones(2, K).half()
KEPT_WITH_A_CALL = (RequestError, grpc.aio.AbortError)
LIMITS = LimitsConfig(
    max_request_bytes=8 * K * 2,
    max_response_bytes=2048,
    max_request_rows=10,
    max_queue_rows=12,
    max_queue_bytes=4096,
)


@pytest.mark.parametrize(("rows", "text"), [(12, "12 rows wait"), (2, "of 4096 bytes")])
async def test_a_full_queue_is_retryable_and_says_when(start: Start, rows: int, text: str) -> None:
    """By rows, then by bytes: two slots of 1 KiB wait, one runs, and 2 KiB are asked for."""
    running = await start(limits=LIMITS if rows == 2 else replace(LIMITS, max_queue_bytes=1 << 20))
    busy = await running.hold()
    sizes = [6, 6] if rows == 12 else [1, 1]
    waiting = [
        asyncio.create_task(running.matmul("one/up", torch.ones(size, K).half())) for size in sizes
    ]
    await running.until_queued(sum(sizes))
    x = torch.ones(1, K).half() if rows == 12 else torch.ones(7, K).half()
    error = await running.refused(running.request("one/up", x))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert text in error.details()
    assert int(trailers(error)["grpc-retry-pushback-ms"]) > 0
    running.kernels.gate.set()
    await asyncio.gather(busy, *waiting)
    await running.matmul("one/up", x)


async def test_a_call_that_waited_too_long_is_retryable(start: Start) -> None:
    running = await start(limits=LimitsConfig(max_queue_age_seconds=0.05))
    busy = await running.hold()
    error = await running.refused(running.request("one/up", X))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert "max_queue_age" in error.details()
    assert int(trailers(error)["grpc-retry-pushback-ms"]) > 0
    running.kernels.gate.set()
    await busy
    assert running.kernels.rows_seen() == [0]


@pytest.mark.parametrize("how", ["full", "too old", "too late", "wrong"])
async def test_calls_that_are_refused_leave_nothing_to_the_garbage_collector(
    start: Start, how: str
) -> None:
    """Cycles of dead calls made it stop the server for 50 ms a second when the queue was full."""
    age = 0.05 if how == "too old" else WAIT_SECONDS
    limits = replace(LIMITS, max_queue_age_seconds=age, max_queue_bytes=1 << 20)
    running = await start(limits=limits)
    busy = await running.hold()
    timeout = 0.02 if how == "too late" else WAIT_SECONDS
    x = torch.ones(1, K // 2 if how == "wrong" else K).half()
    sizes = [6, 6] if how == "full" else []
    waiting = [
        asyncio.create_task(running.matmul("one/up", torch.ones(size, K).half())) for size in sizes
    ]
    await running.until_queued(sum(sizes))
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert (await running.refused(running.request("one/up", x), timeout=timeout)).code()
        await until(lambda: int(running.server._lifecycle.admitted) == 1 + len(waiting))
        for _ in range(3):
            await running.stub.GetServerInfo(pb.GetServerInfoRequest())  # gRPC lets go of the last
        left = [kept for kept in gc.get_objects() if isinstance(kept, KEPT_WITH_A_CALL)]
    finally:
        gc.enable()
    assert not left
    running.kernels.gate.set()
    await asyncio.gather(busy, *waiting)


async def test_what_missed_its_deadline_is_never_computed(running: Running) -> None:
    busy = await running.hold()
    error = await running.refused(running.request("one/up", X), timeout=0.1)
    assert error.code() is Code.DEADLINE_EXCEEDED
    await running.until_queued(0)
    running.kernels.gate.set()
    await busy
    await running.lives_on()
    assert running.kernels.rows_seen() == [0, 1, 1]


async def test_deadlines_that_server_and_grpc_notice_at_once_leave_no_traceback(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    busy = await running.hold()
    request = running.request("one/up", X)
    with caplog.at_level(logging.ERROR):
        for _ in range(4):
            timeouts = [0.05 + number * 1e-4 for number in range(100)]
            await asyncio.gather(*(running.refused(request, timeout=t) for t in timeouts))
        await until(lambda: int(running.server._lifecycle.admitted) == 1)
    assert not caplog.records
    running.kernels.gate.set()
    await busy


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
async def test_what_its_caller_took_back_is_never_computed(running: Running, how: str) -> None:
    busy = await running.hold()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{running.port}")
    call = channel.unary_unary("/qlinear.v1.QuantizedLinear/MatMul")(
        running.request(["one/up", "one/down"], 7 * X).SerializeToString()
    )
    neighbour = asyncio.create_task(running.matmul("one/up", X))
    await running.until_queued(6)
    if how == "cancel":
        call.cancel()
    await channel.close()
    await running.until_queued(2)
    running.kernels.gate.set()
    await asyncio.gather(busy, neighbour)
    assert running.kernels.rows_seen() == [0, 1, 1]
    assert call.cancelled() or how == "disconnect"


async def test_cancelled_while_it_runs_frees_everything_afterwards(running: Running) -> None:
    running.kernels.gate.clear()
    call = running.stub.MatMul(running.request("one/up", X))
    await running.entered()
    call.cancel()
    assert running.server._batching is not None
    while int(running.server._lifecycle.admitted):
        await asyncio.sleep(0)
    assert running.server._batching.batcher.items_held == 1
    running.kernels.gate.set()
    await running.lives_on()
    assert running.server._batching.batcher.items_held == 0


async def test_a_failed_computation_hits_its_own_caller_only(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    busy = await running.hold()
    bad = asyncio.create_task(running.refused(running.request("one/up", 13 * X)))
    good = asyncio.create_task(running.matmul("one/up", X))
    await running.until_queued(4)
    running.kernels.gate.set()
    error = await bad
    (y,) = await good
    await busy
    assert_close(y, running.expected("one/up", X))
    assert error.code() is Code.INTERNAL
    assert "secret" not in error.details()
    incident = error.details().rsplit(" ", 1)[-1]
    record = next(r for r in caplog.records if f"incident={incident}" in r.getMessage())
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert "secret 13" in str(record.exc_info[1])


async def test_one_failing_layer_fails_the_call(running: Running) -> None:
    x = X.clone()
    x[0, 0] = 13
    error = await running.refused(running.request(["one/up", "one/down"], x))
    assert error.code() is Code.INTERNAL
    # The first one failed: the second was taken back.
    assert [name for name, _ in running.kernels.batches] == ["one/up"]
    await running.lives_on()


@pytest.mark.parametrize("fault", [ZeroDivisionError("secret"), asyncio.CancelledError("secret")])
async def test_a_bug_of_ours_is_internal_and_never_a_hang(
    running: Running,
    fault: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A CancelledError that is not the call's own must not end it without an answer."""

    async def call(*args: Any, **more: Any) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(LocalTransport, "call", call)
        error = await running.refused(running.request("one/up", X), timeout=5)
    assert error.code() is Code.INTERNAL
    assert "secret" not in error.details()
    assert f"incident={error.details().rsplit(' ', 1)[-1]}" in caplog.text
    await running.lives_on()
    assert await running.server._lifecycle.admitted.wait_none(WAIT_SECONDS)


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_8000_calls_at_once_are_answered_or_told_to_come_again(
    start: Start, transport: str
) -> None:
    """Of ten clients, and far more than may wait: none is lost, none brings anything down."""
    running = await start(limits=LIMITS)
    expected = running.expected("one/up", X)

    async def of_one(client: AsyncClient) -> int:
        calls = [client.matmul("one/up", X) for _ in range(800)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, ResourceExhausted):
                assert answer.retry_after_seconds is not None
            elif isinstance(answer, Unavailable) and transport == "unary":
                assert answer.retryable  # more at once than a connection has room for
            else:
                assert_close(answer, expected)
        return sum(isinstance(answer, torch.Tensor) for answer in answers)

    async with AsyncExitStack() as stack:
        target = f"127.0.0.1:{running.port}"
        clients = [
            await stack.enter_async_context(
                AsyncClient(target, transport=transport, timeout=60, max_retries=0)
            )
            for _ in range(10)
        ]
        for client in clients:
            await client.server_info()  # or each of its first calls would ask
        answered = sum(await asyncio.gather(*map(of_one, clients)))
    assert 0 < answered < 8000
    await running.lives_on()
