"""The one place that answers calls: once each, whatever the caller does with it."""

import logging

import pytest

from qlinear_service.batching import BatchKey, WorkItem
from qlinear_service.dtypes import DType
from qlinear_service.errors import Unavailable
from qlinear_service.pending import Pending, PendingCall
from qlinear_service.results import Answer
from qlinear_service.slots import Slot


def test_a_call_is_answered_once() -> None:
    told: list[Answer] = []
    call = PendingCall((), told.append)
    error = Unavailable("over")
    call.answer(error)
    call.answer([])
    assert told == [error]
    assert call.is_settled


def test_a_caller_that_left_is_told_nothing() -> None:
    call = PendingCall((), lambda answer: pytest.fail("told"))
    call.is_settled = True
    call.answer([])


def test_a_caller_that_fails_at_its_answer_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def settle(answer: Answer) -> None:
        raise ValueError("a fault of the caller")

    PendingCall((), settle).answer([])
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, "settle_failed")
    assert "a fault of the caller" in str(record.exc_info)


def test_pieces_are_in_order_whichever_was_done_first() -> None:
    key = BatchKey("m/a", DType.F16, DType.F16)
    item = WorkItem(sequence=1, key=key, rows=6, slot=Slot(0, 0), nbytes=6, enqueued_at=0.0)
    pending = Pending(item, PendingCall((item,), lambda answer: None))
    for first_row in (4, 0, 2):
        pending.pieces[first_row] = memoryview(bytes([first_row, first_row + 1]))
    assert b"".join(pending.outcome().pieces) == bytes(range(6))
