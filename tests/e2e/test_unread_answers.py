"""Unary clients that do not read: their large answers are bounded as those of a stream are."""

import asyncio
import logging

import pytest
import torch
from http2_peer import DeafPeer
from running_server import K, Running, Start, assert_close
from stream_peer import until

from qlinear_service.commands.serve import is_a_fault
from qlinear_service.config import LimitsConfig
from qlinear_service.errors import Overloaded
from qlinear_service.unread import COUNTED_BYTES, UnreadAnswers

PATH = "/qlinear.v1.QuantizedLinear/MatMul"
X = torch.ones(100, K).half()
LAYERS = ["one/up"] * 30
ANSWER_BYTES = 30 * 100 * 40 * 2
LIMIT = 8 * ANSWER_BYTES
CALLS = 60


async def test_a_client_that_reads_no_unary_answers_holds_bounded_memory(start: Start) -> None:
    """Of 60 answers 8 are held; the other calls are refused, and nobody else's are."""
    assert ANSWER_BYTES > COUNTED_BYTES
    running = await start(limits=LimitsConfig(max_stream_bytes=LIMIT))
    unread = running.server._servicer._unread
    peer = await DeafPeer.connect(running.port)
    message = running.request(LAYERS, X).SerializeToString()
    for number in range(1, CALLS + 1):
        await peer.call(PATH, message)
        await until(lambda sent=number: peer.refused + len(held(running)) == sent)
    assert list(unread._bytes.values()) == [LIMIT]
    assert peer.refused == CALLS - 8
    for y in await running.matmul(LAYERS, X):  # over another connection
        assert_close(y, running.expected("one/up", X))
    await peer.close()
    await until(lambda: not unread._bytes)
    assert await running.server._lifecycle.admitted.wait_none(20)
    await running.lives_on()


def held(running: Running) -> range:
    """Return a place for each answer that its client has not read."""
    return range(sum(running.server._servicer._unread._bytes.values()) // ANSWER_BYTES)


async def test_answers_count_until_their_task_ends() -> None:
    unread = UnreadAnswers(100)
    sent = asyncio.Event()

    async def call() -> None:
        unread.check("a", 200)  # one always fits
        unread.hold("a", 90)
        await sent.wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    unread.check("a", 10)
    unread.check("b", 1000)
    with pytest.raises(Overloaded, match="90 bytes of answers"):
        unread.check("a", 11)
    sent.set()
    await task
    await asyncio.sleep(0)
    unread.check("a", 1000)
    assert not unread._bytes


async def test_a_client_that_leaves_its_answers_makes_no_noise(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC logs an error with a traceback for each, which `qlinear serve` takes for none."""
    peer = await DeafPeer.connect(running.port)
    await peer.call(PATH, running.request(LAYERS, X).SerializeToString())
    await until(lambda: len(held(running)) == 1)
    with caplog.at_level(logging.ERROR):
        await peer.close()
        await until(lambda: not held(running))
    assert caplog.records  # else gRPC has changed, and the filter may go
    assert not [record for record in caplog.records if is_a_fault(record)]
