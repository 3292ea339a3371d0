"""Calls that come while answers of their stream wait to be sent: they run together, and late.

A real server's stream, with a stand-in for its connection, so that a test decides when an answer
leaves. The rule compares times; tests set what sending takes to far more or less than computing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
import torch
from running_server import K, Running, Start, assert_close, decode
from stream_peer import slab_of, until

from qlinear.v1 import linear_pb2 as pb
from qlinear_service import streaming
from qlinear_service.config import LimitsConfig
from qlinear_service.streaming import CallStream


class Connection:
    """gRPC's context of a stream: what the client sends, and whether it reads."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.is_broken = False
        self.answers: list[pb.StreamResponse] = []
        serving = running.server._servicer._serving
        assert serving is not None
        self.stream = CallStream(
            self,  # type: ignore[arg-type]
            serving=serving,
            lifecycle=running.server._lifecycle,
            max_age_seconds=1000,
        )
        self.task = asyncio.create_task(self.stream.run())

    def time_remaining(self) -> None:
        """No deadline."""

    def invocation_metadata(self) -> None:
        """No metadata."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4711"

    async def read(self) -> Any:
        return await self.incoming.get()

    async def write(self, raw: bytes) -> None:
        await self.reads.wait()
        if self.is_broken:
            raise grpc.aio.InternalError("the client is gone")
        self.answers.append(pb.StreamResponse.FromString(raw))

    def send(self, request_id: int, value: float | None = None, **more: Any) -> None:
        """Send a call whose one row is full of `value`, of its id if there is none."""
        x = torch.full((1, K), float(request_id) if value is None else value).half()
        message = pb.StreamRequest(
            request_id=request_id, call=self.running.request("one/up", x), **more
        )
        self.incoming.put_nowait(message.SerializeToString())

    def cancel(self, request_id: int) -> None:
        message = pb.StreamRequest(request_id=request_id, cancel=pb.Cancel())
        self.incoming.put_nowait(message.SerializeToString())

    async def until_read(self) -> None:
        """Wait until the server has read all that was sent, and done what it does at once."""
        await until(self.incoming.empty)
        for _ in range(20):
            await asyncio.sleep(0)

    async def two_answers_wait(self) -> None:
        """See to it that one answer is being written, and another one waits for it."""
        for request_id in (1, 2):
            self.send(request_id)
            await until(lambda: len(self.running.kernels.batches) == request_id)  # noqa: B023
        await until(lambda: len(self.stream._finished) == 1)

    async def finish(self) -> dict[int, pb.StreamResponse]:
        """Let the client read everything and leave; return the answers by id."""
        self.reads.set()
        self.incoming.put_nowait(grpc.aio.EOF)
        await asyncio.wait_for(self.task, 20)
        assert len({answer.request_id for answer in self.answers}) == len(self.answers)
        return {answer.request_id: answer for answer in self.answers}

    def check(self, answer: pb.StreamResponse) -> None:
        """Check the result of a call that was sent without a value of its own."""
        x = torch.full((1, K), float(answer.request_id)).half()
        assert_close(decode(answer.result.y[0]), self.running.expected("one/up", x))


Open = Callable[..., Awaitable[Connection]]


@pytest.fixture
def connect(start: Start, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return a function that opens a stream on which sending takes far longer than computing."""
    monkeypatch.setattr(streaming, "SEND_NANOSECONDS", 10**12)

    async def connect(**limits: int) -> Connection:
        return Connection(await start(limits=LimitsConfig(**limits)))

    return connect


async def test_calls_that_come_while_answers_wait_are_one_batch(connect: Open) -> None:
    connection = await connect()
    await connection.two_answers_wait()
    for request_id in range(3, 11):
        connection.send(request_id)
    await connection.until_read()
    assert len(connection.running.kernels.batches) == 2
    answers = await connection.finish()
    assert [len(x) for _, x in connection.running.kernels.batches] == [1, 1, 8]
    assert sorted(answers) == list(range(1, 11))
    for answer in answers.values():
        connection.check(answer)


async def test_a_computation_longer_than_sending_is_not_put_off(
    connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SEND_NANOSECONDS", 1)
    connection = await connect()
    await connection.two_answers_wait()
    # An error says nothing of what computing takes.
    connection.incoming.put_nowait(pb.StreamRequest(request_id=3).SerializeToString())
    connection.send(4)
    await until(lambda: len(connection.running.kernels.batches) == 3)
    assert sorted(await connection.finish()) == [1, 2, 3, 4]


async def test_while_nothing_waits_to_be_sent_nothing_is_put_off(connect: Open) -> None:
    connection = await connect()
    connection.send(1)
    await until(lambda: len(connection.running.kernels.batches) == 1)
    connection.reads.set()
    await until(lambda: len(connection.answers) == 1)
    connection.send(2)
    await until(lambda: len(connection.answers) == 2)
    assert sorted(await connection.finish()) == [1, 2]


async def test_what_gathers_outside_the_queue_is_bounded(
    connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "MOST_GATHERED_BYTES", 3 * K * 2)
    connection = await connect()
    await connection.two_answers_wait()
    for request_id in (3, 4, 5):
        connection.send(request_id)
    await connection.until_read()
    assert len(connection.running.kernels.batches) == 2
    connection.send(6)
    await until(lambda: len(connection.running.kernels.batches) == 3)
    # The count begins anew.
    connection.send(7)
    await connection.until_read()
    assert [len(x) for _, x in connection.running.kernels.batches] == [1, 1, 4]
    assert sorted(await connection.finish()) == [1, 2, 3, 4, 5, 6, 7]


async def test_a_call_that_gathers_can_be_taken_back(connect: Open) -> None:
    connection = await connect()
    await connection.two_answers_wait()
    for request_id in (3, 4, 5):
        connection.send(request_id)
    connection.cancel(4)
    connection.cancel(99)
    answers = await connection.finish()
    assert answers.pop(4).error.code == grpc.StatusCode.CANCELLED.value[0]
    assert sorted(answers) == [1, 2, 3, 5]
    for answer in answers.values():
        connection.check(answer)
    assert 4 not in connection.running.kernels.rows_seen()


async def test_a_call_that_is_too_late_when_it_has_gathered_is_never_computed(
    connect: Open,
) -> None:
    connection = await connect()
    await connection.two_answers_wait()
    connection.send(3, timeout_nanoseconds=1_000_000)
    connection.send(4)
    await connection.until_read()
    await asyncio.sleep(0.01)
    answers = await connection.finish()
    assert answers[3].error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    connection.check(answers[4])
    assert connection.running.kernels.rows_seen() == [1, 2, 4]


async def test_a_full_queue_refuses_what_has_gathered_one_by_one(connect: Open) -> None:
    connection = await connect(max_queue_rows=3, max_request_rows=3)
    await connection.two_answers_wait()
    for request_id in range(3, 9):
        connection.send(request_id)
    answers = await connection.finish()
    refused = [number for number, answer in answers.items() if answer.HasField("error")]
    assert sorted(refused) == [6, 7, 8]
    for number in refused:
        assert answers[number].error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert answers[number].error.retry_after_nanoseconds > 0


async def test_what_has_gathered_is_answered_before_the_stream_goes_away(connect: Open) -> None:
    connection = await connect()
    await connection.two_answers_wait()
    for request_id in (3, 4):
        connection.send(request_id)
    await connection.until_read()
    connection.stream.leave()
    connection.send(5)
    answers = await connection.finish()
    assert answers.pop(0).HasField("going_away")
    assert answers.pop(5).error.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert sorted(answers) == [1, 2, 3, 4]
    for answer in answers.values():
        connection.check(answer)


async def test_what_has_gathered_is_dropped_with_its_stream(connect: Open) -> None:
    connection = await connect()
    await connection.two_answers_wait()
    for request_id in (3, 4, 5):
        connection.send(request_id)
    await connection.until_read()
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    await connection.running.lives_on()
    assert connection.running.kernels.rows_seen() == [1, 2, 1, 1]
    assert slab_of(connection.running).used_bytes == 0
    cancelled = connection.running.server.metrics.families["qlinear_cancelled_total"]
    assert cancelled.number().value == 3


async def test_what_has_gathered_is_not_computed_once_a_write_has_failed(connect: Open) -> None:
    """gRPC has not ended the stream yet, and its reader has one more message to read."""
    connection = await connect()
    await connection.two_answers_wait()
    for request_id in (3, 4, 5):
        connection.send(request_id)
    await connection.until_read()
    connection.is_broken = True
    connection.reads.set()
    await until(lambda: not connection.stream._unanswered)
    connection.send(6)
    await connection.until_read()
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    await connection.running.lives_on()
    assert not {3, 4, 5} & {*connection.running.kernels.rows_seen()}
