"""MatMulStream on a real server: what ends one call, what ends the stream, and what is dropped."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from refused_requests import LIMITS, REFUSED
from running_server import WAIT_SECONDS, K, Running, Start, assert_close
from stream_peer import open_stream, slab_of, until

from qlinear.v1 import linear_pb2 as pb
from qlinear_service.calls import Serving
from qlinear_service.transport import LocalTransport

Code = grpc.StatusCode
X = torch.ones(2, K).half()


def number_of(code: grpc.StatusCode) -> int:
    return int(code.value[0])


async def test_a_broken_contract_ends_one_call_with_the_words_of_unary(running: Running) -> None:
    peer = open_stream(running)
    for number, (name, (request, code, text)) in enumerate(REFUSED.items(), 1):
        await peer.write(pb.StreamRequest(request_id=number, call=request))
        error = await peer.error(number)
        assert error.code == number_of(code), name
        assert text in error.message, name
        assert error.retry_after_nanoseconds == 0, name
    assert running.kernels.batches == []
    await peer.lives_on()


async def test_a_message_without_a_known_body_is_unimplemented(running: Running) -> None:
    """No body at all, or one from the future: field 13, length-delimited, empty."""
    peer = open_stream(running)
    await peer.write(pb.StreamRequest(request_id=7, want_timing=True))
    assert (await peer.error(7)).code == number_of(Code.UNIMPLEMENTED)
    await peer.write(pb.StreamRequest(request_id=8).SerializeToString() + b"\x6a\x00")
    error = await peer.error(8)
    assert error.code == number_of(Code.UNIMPLEMENTED)
    assert "request 8 has no body that this server knows" in error.message
    await peer.lives_on()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.StreamRequest(call=pb.MatMulRequest(layer="one/up")), "request_id 0 is no id"),
        (pb.StreamRequest(cancel=pb.Cancel()), "request_id 0 is no id"),
        (pb.StreamRequest(), "request_id 0 is no id"),
        (pb.StreamRequest(request_id=1, call=pb.MatMulRequest()), "request_id 1 was sent again"),
        (pb.StreamRequest(request_id=1), "request_id 1 was sent again"),
        (b"\xff\xff\xff", "no valid StreamRequest"),
    ],
)
async def test_a_client_bug_ends_the_stream_and_drops_what_is_unanswered(
    running: Running, message: Any, text: str
) -> None:
    busy = await running.hold()
    peer = open_stream(running)
    await peer.send(1, "one/up", 7 * X)
    await running.until_queued(2)
    await peer.write(message)
    code, details = await peer.ended()
    assert code is Code.INVALID_ARGUMENT
    assert text in details
    await running.until_queued(0)
    running.kernels.gate.set()
    await busy
    await until(lambda: slab_of(running).used_bytes == 0)
    assert running.kernels.rows_seen() == [0]
    await running.lives_on()


async def test_beyond_the_transport_limit_the_stream_ends(start: Start) -> None:
    running = await start(limits=LIMITS)
    peer = open_stream(running)
    await peer.lives_on()
    await peer.write(bytes(2 * LIMITS.max_request_bytes + 1))
    code, details = await peer.ended()
    assert code is Code.RESOURCE_EXHAUSTED
    assert "larger than max" in details
    await running.lives_on()
    await until(lambda: int(running.server._lifecycle.admitted) == 0)


async def test_limits_end_one_call_and_are_not_retryable(start: Start) -> None:
    running = await start(limits=LIMITS)
    peer = open_stream(running)
    await peer.send(1, "one/up", torch.ones(11, K).half())
    error = await peer.error(1)
    assert (error.code, error.retry_after_nanoseconds) == (number_of(Code.RESOURCE_EXHAUSTED), 0)
    assert "11 rows; at most 10" in error.message
    await peer.lives_on()


async def test_a_full_queue_is_retryable_and_says_when(start: Start) -> None:
    running = await start(limits=replace(LIMITS, max_queue_bytes=1 << 20))
    peer = open_stream(running)
    busy = await running.hold()
    for number in (1, 2, 3):
        await peer.send(number, "one/up", torch.ones(6, K).half())
    error = await peer.error(3)
    assert error.code == number_of(Code.RESOURCE_EXHAUSTED)
    assert "12 rows wait" in error.message
    assert error.retry_after_nanoseconds > 0
    running.kernels.gate.set()
    await peer.result(1)
    await peer.result(2)
    await busy
    await peer.lives_on()


async def test_a_failed_computation_hits_its_own_id_only(running: Running, caplog: Any) -> None:
    peer = open_stream(running)
    busy = await running.hold()
    await peer.send(1, "one/up", 13 * X)
    await peer.send(2, "one/up", X)
    await running.until_queued(4)
    running.kernels.gate.set()
    error = await peer.error(1)
    assert error.code == number_of(Code.INTERNAL)
    assert "secret" not in error.message
    assert f"incident={error.message.rsplit(' ', 1)[-1]}" in caplog.text
    (y,) = await peer.result(2)
    assert_close(y, running.expected("one/up", X))
    await busy
    await peer.lives_on()


@pytest.mark.parametrize("place", [(LocalTransport, "submit"), (Serving, "encode")])
async def test_a_bug_of_ours_is_internal_for_one_id_and_never_a_hang(
    running: Running, monkeypatch: Any, caplog: Any, place: tuple[type, str]
) -> None:
    """On the way in and, where no caller would see it raise, on the way out."""

    def broken(*args: Any, **more: Any) -> None:
        raise ZeroDivisionError("secret")

    peer = open_stream(running)
    with monkeypatch.context() as patch:
        patch.setattr(*place, broken)
        await peer.send(1, "one/up", X)
        error = await peer.error(1)
    assert error.code == number_of(Code.INTERNAL)
    assert "secret" not in error.message
    assert f"incident={error.message.rsplit(' ', 1)[-1]}" in caplog.text
    await peer.lives_on()


async def test_timeouts_are_per_call_and_what_missed_them_is_never_computed(
    running: Running,
) -> None:
    peer = open_stream(running)
    busy = await running.hold()
    await peer.send(1, "one/up", 3 * X, timeout_nanoseconds=50_000_000)
    await peer.send(2, "one/up", X)
    error = await peer.error(1)
    assert error.code == number_of(Code.DEADLINE_EXCEEDED)
    assert running.server._batching is not None
    await running.until_queued(2)
    running.kernels.gate.set()
    await peer.result(2)
    await busy
    assert 3 not in running.kernels.rows_seen()
    await peer.lives_on()


async def test_a_timeout_never_outlives_the_stream(running: Running) -> None:
    """Both calls: the one that asks for an hour and the one that asks for nothing."""
    busy = await running.hold()
    peer = open_stream(running, timeout=2)
    await peer.send(1, "one/up", 3 * X, timeout_nanoseconds=3_600_000_000_000)
    await peer.send(2, "one/up", 3 * X)
    await running.until_queued(4)
    assert running.server._batching is not None
    entries = list(running.server._batching.batcher._queue._waiting.all())
    now = asyncio.get_running_loop().time()
    deadlines = [entry.item.deadline for entry in entries]
    assert all(deadline is not None and deadline < now + 10 for deadline in deadlines)
    answers: list[bytes] = []

    async def read_all() -> None:
        while True:
            answers.append(await asyncio.wait_for(peer.call.read(), WAIT_SECONDS))

    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await read_all()
    assert ended.value.code() is Code.DEADLINE_EXCEEDED
    # The server may be the first to see that time is up.
    codes = [pb.StreamResponse.FromString(raw).error.code for raw in answers]
    assert set(codes) <= {number_of(Code.DEADLINE_EXCEEDED)}
    await running.until_queued(0)
    running.kernels.gate.set()
    await busy
    assert running.kernels.rows_seen() == [0]


async def test_cancel_before_the_call_runs(running: Running) -> None:
    peer = open_stream(running)
    busy = await running.hold()
    await peer.send(1, ["one/up", "one/down"], 5 * X)
    await peer.send(2, "one/up", X)
    await running.until_queued(6)
    await peer.cancel(1)
    error = await peer.error(1)
    assert error.code == number_of(Code.CANCELLED)
    await running.until_queued(2)
    running.kernels.gate.set()
    await peer.result(2)
    await busy
    assert 5 not in running.kernels.rows_seen()


async def test_cancel_after_the_call_has_started_changes_nothing(running: Running) -> None:
    peer = open_stream(running)
    running.kernels.gate.clear()
    await peer.send(1, ["one/up", "one/down"], X)
    await running.entered()
    await peer.cancel(1)
    await peer.cancel(99)
    await peer.cancel(1)
    running.kernels.gate.set()
    up, down = await peer.result(1)
    assert_close(up, running.expected("one/up", X))
    assert_close(down, running.expected("one/down", X))
    await peer.cancel(1)
    await peer.lives_on()
