"""The stream without its connection: ids, order of sending, meaning of messages and ends."""

from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlinear.v1 import linear_pb2 as pb
from qlinear_client import CallError, Internal, NotFound, ResourceExhausted, Unavailable
from qlinear_client._retries import Moved, SendAlone
from qlinear_client._stream_core import StreamCore

Code = grpc.StatusCode


def call(layer: str = "a") -> pb.StreamRequest:
    return pb.StreamRequest(call=pb.MatMulRequest(layer=layer))


def enter(core: StreamCore[str], waiter: str, **options: Any) -> int:
    return core.enter(call(waiter), waiter, **{"timeout_seconds": None, **options})


def result(request_id: int) -> pb.StreamResponse:
    return pb.StreamResponse(
        request_id=request_id, result=pb.MatMulResponse(y=[pb.Tensor(shape=[request_id])])
    )


def error(request_id: int, code: int, text: str = "words", after: int = 0) -> pb.StreamResponse:
    return pb.StreamResponse(
        request_id=request_id,
        error=pb.Error(code=code, message=text, retry_after_nanoseconds=after),
    )


def sent(core: StreamCore[str]) -> list[pb.StreamRequest]:
    return list(iter(core.next_message, None))


def one_error(settled: Any) -> tuple[str, Exception]:
    ((waiter, outcome),) = settled
    assert isinstance(outcome, Exception)
    return waiter, outcome


GOING_AWAY = pb.StreamResponse(going_away=pb.GoingAway())


def test_calls_are_sent_in_order_with_ids_of_their_own_and_their_timeouts() -> None:
    core: StreamCore[str] = StreamCore()
    assert [enter(core, "a"), enter(core, "b", timeout_seconds=1.5)] == [1, 2]
    enter(core, "c", timeout_seconds=1e-12)
    enter(core, "d", timeout_seconds=1e30)
    messages = sent(core)
    assert [message.call.layer for message in messages] == list("abcd")
    assert [message.request_id for message in messages] == [1, 2, 3, 4]
    timeouts = [message.timeout_nanoseconds for message in messages]
    assert timeouts == [0, 1_500_000_000, 1, (1 << 64) - 1]


@given(st.permutations(range(1, 9)))
def test_answers_find_their_waiters_in_any_order(order: list[int]) -> None:
    core: StreamCore[str] = StreamCore()
    ids = {enter(core, f"waiter {number}"): f"waiter {number}" for number in range(8)}
    for request_id in order:
        ((waiter, outcome),) = core.on_message(result(request_id))
        assert waiter == ids[request_id]
        assert isinstance(outcome, pb.MatMulResponse)
        assert outcome.y[0].shape == [request_id]
    assert len(core) == 0
    assert core.on_message(result(3)) == []  # a second answer to one id reaches nobody


@pytest.mark.parametrize(
    ("number", "after", "kind", "retryable", "seconds"),
    [
        (5, 0, NotFound, False, None),
        (8, 0, ResourceExhausted, False, None),
        (8, 250_000_000, ResourceExhausted, True, 0.25),
        (14, 0, Unavailable, True, None),
        (0, 0, Internal, False, None),
        (99, 0, CallError, False, None),
    ],
)
def test_errors_are_those_of_unary_calls(
    number: int, after: int, kind: type, retryable: bool, seconds: float | None
) -> None:
    core: StreamCore[str] = StreamCore()
    enter(core, "a")
    _, raised = one_error(core.on_message(error(1, number, after=after)))
    assert isinstance(raised, CallError)
    assert type(raised) is kind
    assert (raised.retryable, raised.retry_after_seconds) == (retryable, seconds)
    assert core.is_open


def test_an_answer_of_no_known_kind_ends_its_call() -> None:
    core: StreamCore[str] = StreamCore()
    enter(core, "a")
    _, raised = one_error(core.on_message(pb.StreamResponse(request_id=1)))
    assert isinstance(raised, Internal)


def test_going_away_moves_what_was_not_sent_and_waits_for_the_rest() -> None:
    core: StreamCore[str] = StreamCore()
    enter(core, "sent")
    enter(core, "seen too late")
    sent(core)
    enter(core, "unsent")
    waiter, raised = one_error(core.on_message(GOING_AWAY))
    assert (waiter, type(raised)) == ("unsent", Moved)
    assert not core.is_open
    assert not core.has_ended
    assert sent(core) == []
    ((waiter, outcome),) = core.on_message(result(1))
    assert (waiter, type(outcome)) == ("sent", pb.MatMulResponse)
    waiter, raised = one_error(core.on_message(error(2, 14)))
    assert (waiter, type(raised)) == ("seen too late", Moved)
    with pytest.raises(Moved):
        enter(core, "new")


@pytest.mark.parametrize(
    ("code", "leaving", "kind"),
    [
        (Code.OK, False, Moved),
        (Code.OK, True, Moved),
        (Code.UNAVAILABLE, True, Moved),
        (Code.UNAVAILABLE, False, Unavailable),
        (Code.CANCELLED, False, Unavailable),
        (Code.UNIMPLEMENTED, False, SendAlone),
        (Code.RESOURCE_EXHAUSTED, False, SendAlone),
        (Code.INTERNAL, False, SendAlone),
    ],
)
def test_how_each_end_of_a_stream_ends_its_calls(
    code: grpc.StatusCode, leaving: bool, kind: type
) -> None:
    core: StreamCore[str] = StreamCore()
    enter(core, "a")
    enter(core, "b")
    sent(core)
    if leaving:
        core.on_message(GOING_AWAY)
    settled = core.on_end(code, "why")
    assert [(waiter, type(outcome)) for waiter, outcome in settled] == [("a", kind), ("b", kind)]
    assert settled[0][1] is not settled[1][1]
    assert core.has_ended
    with pytest.raises(kind):
        enter(core, "late")


def test_what_is_taken_back_is_cancelled_and_its_answer_ignored() -> None:
    core: StreamCore[str] = StreamCore()
    enter(core, "a")
    sent(core)
    assert core.forget(1)
    assert not core.forget(1)
    assert sent(core) == [pb.StreamRequest(request_id=1, cancel=pb.Cancel())]
    assert core.on_message(error(1, 1)) == []


def test_what_is_taken_back_before_it_was_sent_is_never_sent() -> None:
    core: StreamCore[str] = StreamCore()
    enter(core, "a")
    enter(core, "b")
    core.forget(1)
    assert [message.request_id for message in sent(core) if message.HasField("call")] == [2]


def test_expiry_by_an_injected_clock() -> None:
    core: StreamCore[str] = StreamCore()
    enter(core, "late", expires_at=9.0)
    enter(core, "soon", expires_at=3.0)
    enter(core, "answered", expires_at=1.0)
    enter(core, "never")
    core.on_message(result(3))
    assert core.next_expiry() == 3.0
    assert list(core.expire(2.9)) == []
    assert list(core.expire(3.0)) == ["soon"]
    assert core.next_expiry() == 9.0
    assert list(core.expire(100.0)) == ["late"]
    assert core.next_expiry() is None
    assert len(core) == 1
