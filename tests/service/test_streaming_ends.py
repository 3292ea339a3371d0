"""Ends of calls that come at the same moment from two sides: each call is counted once."""

import asyncio
import logging
from typing import Any

import grpc
import pytest

from qlinear_service import handlers
from qlinear_service.codec import CheckedRequest
from qlinear_service.errors import DeadlineExceeded
from qlinear_service.streaming import NO_BYTES, CallStream, _Call
from qlinear_service.wire import StreamFields


class Counting:
    """Stands for what streams need of `Serving`."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self.metrics = self
        self.transport = self
        self.carried: Any = None

    def call_finished(self, method: str, layers: Any, code: str, seconds: float, **_: Any) -> None:
        self.codes.append(code)

    def submit(self, checked: CheckedRequest, **_: Any) -> Any:
        class Carried:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            items = ()

        self.carried = Carried()
        return self.carried


async def test_a_result_that_comes_after_the_stream_dropped_its_call_is_nothing() -> None:
    serving, finished = Counting(), []
    call = _Call(1, serving=serving, finish=lambda call, raw: finished.append(raw))  # type: ignore[arg-type]
    call.count("CANCELLED")
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result([])
    call.settle(future)
    assert serving.codes == ["CANCELLED"]
    assert not finished


async def test_a_submitted_call_holds_its_request_no_longer() -> None:
    class Plan:
        rows, response_bytes = 1, 10

    class Stream:
        _serving = Counting()
        _held_bytes = 0

    call = _Call(1, serving=Stream._serving, finish=lambda call, raw: None)  # type: ignore[arg-type]
    call.checked = CheckedRequest(Plan(), memoryview(bytes(1000)))  # type: ignore[arg-type]
    message = StreamFields(1, 0, "", False, "call", None)
    CallStream._submit(Stream(), call, message, None)  # type: ignore[arg-type]
    assert call.checked.x is NO_BYTES
    assert call.held_bytes == 10


async def test_a_call_that_grpc_has_just_ended_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Ended:
        async def abort(self, *_: Any) -> None:
            raise grpc.aio.InternalError("the call is over")

    with caplog.at_level(logging.INFO), pytest.raises(grpc.aio.AbortError):
        await handlers._abort_with(DeadlineExceeded("too late"), "/m", Ended())  # type: ignore[arg-type]
    assert not caplog.records
