"""Each row of the table of statuses, over a real connection; after each the server lives on."""

import asyncio
import logging
import threading
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from running_server import WAIT_SECONDS, K, Running, Start, assert_close, quick_config

from qlinear.v1 import linear_pb2 as pb
from qlinear_service.config import LimitsConfig
from qlinear_service.errors import ConfigError
from qlinear_service.server import Server
from qlinear_service.transport import LocalTransport

Code = grpc.StatusCode
X = torch.ones(2, K).half()
DATA = X.view(torch.uint8).numpy().tobytes()


def tensor(shape: tuple[int, ...], data: bytes, dtype: int = 1) -> pb.Tensor:
    return pb.Tensor(dtype=dtype, shape=shape, data=data)


GOOD = tensor((2, K), DATA)
REFUSED: dict[str, tuple[pb.MatMulRequest, grpc.StatusCode, str]] = {
    "neither": (pb.MatMulRequest(x=GOOD), Code.INVALID_ARGUMENT, "neither layer nor layers"),
    "both": (
        pb.MatMulRequest(layer="up", layers=["up"], x=GOOD),
        Code.INVALID_ARGUMENT,
        "set one of the two",
    ),
    "no x": (pb.MatMulRequest(layer="up"), Code.INVALID_ARGUMENT, "x is missing"),
    "unknown": (pb.MatMulRequest(layer="one/upp", x=GOOD), Code.NOT_FOUND, "one/up"),
    "unknown among several": (
        pb.MatMulRequest(layers=["one/up", "one/none"], x=GOOD),
        Code.NOT_FOUND,
        "'one/none'",
    ),
    "ambiguous": (
        pb.MatMulRequest(layer="down", x=GOOD),
        Code.INVALID_ARGUMENT,
        "one/down, two/down",
    ),
    "two k": (
        pb.MatMulRequest(layers=["one/up", "two/wide"], x=GOOD),
        Code.INVALID_ARGUMENT,
        "k = 96 and 64",
    ),
    "k": (pb.MatMulRequest(layer="two/wide", x=GOOD), Code.INVALID_ARGUMENT, "expected [..., 64]"),
    "dtype": (
        pb.MatMulRequest(layer="up", x=tensor((2, K), DATA, 9)),
        Code.INVALID_ARGUMENT,
        "x.dtype is 9",
    ),
    "output dtype": (
        pb.MatMulRequest(layer="up", output_dtype=9, x=GOOD),
        Code.INVALID_ARGUMENT,
        "output_dtype is 9",
    ),
    "priority": (
        pb.MatMulRequest(layer="up", priority=10, x=GOOD),
        Code.INVALID_ARGUMENT,
        "priority is 10",
    ),
    "one byte less": (
        pb.MatMulRequest(layer="up", x=tensor((2, K), DATA[:-1])),
        Code.INVALID_ARGUMENT,
        "takes 384 bytes; data has 383",
    ),
    "one byte more": (
        pb.MatMulRequest(layer="up", x=tensor((2, K), DATA + b"\0")),
        Code.INVALID_ARGUMENT,
        "takes 384 bytes; data has 385",
    ),
    "negative": (
        pb.MatMulRequest(layer="up", x=tensor((-2, -K), DATA)),
        Code.INVALID_ARGUMENT,
        "no negative dimension",
    ),
    "huge": (
        pb.MatMulRequest(layer="up", x=tensor((1 << 62, 1 << 62, K), DATA)),
        Code.INVALID_ARGUMENT,
        "fewer than 2**63 bytes",
    ),
    "large": (
        pb.MatMulRequest(layer="up", x=tensor((1 << 40, K), DATA)),
        Code.INVALID_ARGUMENT,
        "data has 384",
    ),
    "scalar": (pb.MatMulRequest(layer="up", x=tensor((), b"ab")), Code.INVALID_ARGUMENT, "0 dim"),
}


def trailers(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return {key: str(value) for key, value in error.trailing_metadata()}


async def lives_on(running: Running) -> None:
    (y,) = await running.matmul("one/up", X)
    assert_close(y, running.expected("one/up", X))


async def test_a_broken_contract_gets_its_status_and_words(running: Running) -> None:
    for name, (request, code, text) in REFUSED.items():
        error = await running.refused(request)
        assert error.code() is code, name
        assert text in error.details(), name
        assert not trailers(error), name
    assert running.kernels.batches == []
    await lives_on(running)


async def test_bytes_that_are_no_message_are_invalid(running: Running) -> None:
    call = running.channel.unary_unary("/qlinear.v1.QuantizedLinear/MatMul")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(b"\xff\xff\xff")
    assert refused.value.code() is Code.INVALID_ARGUMENT
    assert "not a valid message" in refused.value.details()
    await lives_on(running)


async def test_an_unknown_model_is_not_found(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no model is called 'three'; loaded: one, two"):
        await running.stub.ListLayers(pb.ListLayersRequest(model="three"))


async def test_the_stream_says_that_it_is_not_there_yet(running: Running) -> None:
    call = running.stub.MatMulStream()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    assert refused.value.code() is Code.UNIMPLEMENTED
    assert "use MatMul" in refused.value.details()


LIMITS = LimitsConfig(
    max_request_bytes=8 * K * 2,
    max_response_bytes=2048,
    max_request_rows=10,
    max_queue_rows=12,
    max_queue_bytes=4096,
)


@pytest.mark.parametrize(
    ("layers", "shape", "dtype", "text"),
    [
        ("one/up", (11, K), torch.half, "11 rows; at most 10"),
        ("one/up", (5, K), torch.float, "1920 bytes; at most 1536"),
        (["one/up"] * 5, (6, K), torch.half, "30 rows to compute; at most 12"),
        (["one/up", "one/up"], (6, K), torch.half, None),
        ("one/up", (8, K), torch.half, None),
        (["one/up"] * 3, (4, K), torch.float, None),
    ],
)
async def test_limits_are_exact_and_not_retryable(
    start: Start, layers: Any, shape: tuple[int, ...], dtype: torch.dtype, text: str | None
) -> None:
    running = await start(limits=LIMITS)
    x = torch.ones(shape).to(dtype)
    if text is None:
        names = [layers] if isinstance(layers, str) else layers
        assert len(await running.matmul(layers, x)) == len(names)
        return
    error = await running.refused(running.request(layers, x))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert text in error.details()
    assert "grpc-retry-pushback-ms" not in trailers(error)
    await lives_on(running)


async def test_a_large_answer_is_refused_before_it_is_computed(start: Start) -> None:
    running = await start(limits=replace(LIMITS, max_response_bytes=1024))
    error = await running.refused(
        running.request("one/up", torch.ones(8, K).half(), output_dtype=3)
    )
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert "answer would have 1280 bytes; at most 1024" in error.details()
    assert running.kernels.batches == []


async def test_beyond_the_transport_limit_grpc_refuses_and_the_server_lives_on(
    start: Start,
) -> None:
    running = await start(limits=LIMITS)
    request = pb.MatMulRequest(layer="up", x=tensor((1, K), bytes(2 * 1536)))
    error = await running.refused(request)
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()
    await lives_on(running)


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


async def test_what_missed_its_deadline_is_never_computed(running: Running) -> None:
    busy = await running.hold()
    error = await running.refused(running.request("one/up", X), timeout=0.1)
    assert error.code() is Code.DEADLINE_EXCEEDED
    await running.until_queued(0)
    running.kernels.gate.set()
    await busy
    await lives_on(running)
    assert running.kernels.rows_seen() == [0, 1, 1]


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
    assert running.server._batcher is not None
    while running.server._lifecycle.calls:
        await asyncio.sleep(0)
    assert running.server._batcher.items_held == 1
    running.kernels.gate.set()
    await lives_on(running)
    assert running.server._batcher.items_held == 0


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
    await lives_on(running)


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
    await lives_on(running)
    assert await running.server._lifecycle.wait_idle(WAIT_SECONDS)


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
    await lives_on(running)


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
    await lives_on(running)
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
