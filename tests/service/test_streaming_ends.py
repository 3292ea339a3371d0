"""Ends of calls that come at the same moment from two sides: each call is counted once."""

from typing import Any

import grpc

from qlinear.v1 import linear_pb2 as pb
from qlinear_service.codec import CheckedRequest
from qlinear_service.stream_call import StreamCall


class Counting:
    """Stands for what streams need of `Serving`."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self.metrics = self
        self.transport = self

    def call_finished(self, method: str, layers: Any, code: str, seconds: float, **_: Any) -> None:
        self.codes.append(code)

    def submit(self, checked: CheckedRequest, **_: Any) -> Any:
        return ()


def call_of(serving: Counting, answers: list[bytes]) -> StreamCall:
    return StreamCall(1, serving=serving, finish=lambda call, raw: answers.append(raw))  # type: ignore[arg-type]


def test_a_result_that_comes_after_the_stream_dropped_its_call_is_nothing() -> None:
    serving, answers = Counting(), []
    call = call_of(serving, answers)
    call.count("CANCELLED")
    call.settle([])
    assert serving.codes == ["CANCELLED"]
    assert not answers


def test_a_submitted_call_holds_its_request_no_longer() -> None:
    call = call_of(Counting(), [])
    call.checked = CheckedRequest(None, memoryview(bytes(1000)))  # type: ignore[arg-type]
    call.submit()
    assert call.checked.x.nbytes == 0


def test_a_result_that_cannot_be_encoded_is_answered_all_the_same() -> None:
    serving, answers = Counting(), []
    call = call_of(serving, answers)
    call.checked = CheckedRequest(None, memoryview(b""))  # type: ignore[arg-type]
    call.settle([])
    assert serving.codes == ["INTERNAL"]
    (raw,) = answers
    assert pb.StreamResponse.FromString(raw).error.code == grpc.StatusCode.INTERNAL.value[0]
