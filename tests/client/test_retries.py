"""Sending again: only where it can help, only as often as asked, never after the deadline."""

import time
from typing import Any

import grpc
import numpy as np
import pytest

from qlinear_client import (
    CallError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from qlinear_client._core import Deadline, Session
from qlinear_client._retries import LONGEST_PAUSE_SECONDS, Moved, Retries

X = np.ones((1, 6), np.float32)
NEVER = Deadline(None)
FULL = ResourceExhausted("full", retryable=True, retry_after_seconds=0.2)
GONE = Unavailable("gone", retryable=True)


@pytest.mark.parametrize(
    "error",
    [
        Internal("x"),
        ResourceExhausted("over a limit"),
        DeadlineExceeded("late"),
        Unavailable("the server says no", retryable=False),
    ],
)
def test_what_another_attempt_cannot_help_is_raised_at_once(error: CallError) -> None:
    with pytest.raises(type(error)) as caught:
        Retries(9).pause_seconds(error, NEVER)
    assert caught.value is error


def test_the_servers_pause_is_kept_and_spread() -> None:
    assert Retries(1, draw=lambda: 0.0).pause_seconds(FULL, NEVER) == 0.2
    assert Retries(1, draw=lambda: 1.0).pause_seconds(FULL, NEVER) == pytest.approx(0.3)


def test_pauses_double_to_a_bound_and_end_after_max_retries() -> None:
    retries = Retries(8, draw=lambda: 1.0)
    pauses = [retries.pause_seconds(GONE, NEVER) for _ in range(8)]
    assert pauses[:4] == pytest.approx([0.05, 0.1, 0.2, 0.4])
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    with pytest.raises(Unavailable):
        retries.pause_seconds(GONE, NEVER)
    halves = Retries(1, draw=lambda: 0.0)
    assert halves.pause_seconds(GONE, NEVER) == pytest.approx(0.025)


def test_no_pause_reaches_beyond_the_deadline() -> None:
    now = [0.0]
    deadline = Deadline(1.0, lambda: now[0])
    retries = Retries(9, draw=lambda: 0.0)
    assert retries.pause_seconds(FULL, deadline) == 0.2
    now[0] = 0.81
    with pytest.raises(ResourceExhausted, match="full"):  # the cause, and at once
        retries.pause_seconds(FULL, deadline)
    now[0] = 1.0
    with pytest.raises(DeadlineExceeded):
        retries.pause_seconds(FULL, deadline)


def test_moves_are_free_the_first_at_once_and_slower_if_they_repeat() -> None:
    retries = Retries(0, draw=lambda: 1.0)
    pauses = [retries.pause_seconds(Moved("m"), NEVER) for _ in range(20)]
    assert pauses[0] == 0
    assert 0 < pauses[1] < pauses[2]
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    with pytest.raises(Unavailable) as caught:
        retries.pause_seconds(Moved("m"), Deadline(0.5))
    assert type(caught.value) is Unavailable


@pytest.mark.parametrize("options", [{"transport": "pigeon"}, {"max_retries": -1}])
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        Session("h:1", None, **options)


def pushback(milliseconds: int) -> tuple[tuple[str, str], ...]:
    return (("grpc-retry-pushback-ms", str(milliseconds)),)


def test_a_call_that_the_server_wants_again_passes(connect: Any, fake: Any) -> None:
    fake.abort = grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", pushback(20)
    fake.aborts_left = 3
    begun = time.monotonic()
    assert connect(fake.target).matmul("toy/a", X).shape == (1, 4)
    assert time.monotonic() - begun >= 0.06
    assert len(fake.requests) == 4
    assert all(request == fake.requests[0] for request in fake.requests)


def test_after_max_retries_the_last_error_is_raised(connect: Any, fake: Any) -> None:
    fake.abort = grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", pushback(1)
    with pytest.raises(ResourceExhausted, match="the queue is full"):
        connect(fake.target, max_retries=2).matmul("toy/a", X)
    assert len(fake.requests) == 3


def test_what_the_server_does_not_want_again_is_not_sent_again(connect: Any, fake: Any) -> None:
    for code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL):
        fake.abort = code, "no", ()
        with pytest.raises(CallError, match="no"):
            connect(fake.target).matmul("toy/a", X)
    assert len(fake.requests) == 2


def test_an_unavailable_server_is_asked_again(connect: Any, fake: Any) -> None:
    fake.abort = grpc.StatusCode.UNAVAILABLE, "starting", ()
    fake.aborts_left = 2
    assert connect(fake.target).matmul("toy/a", X).shape == (1, 4)
    assert len(fake.requests) == 3


def test_a_pause_beyond_the_deadline_is_not_begun(connect: Any, fake: Any) -> None:
    fake.abort = grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", pushback(60_000)
    begun = time.monotonic()
    with pytest.raises(ResourceExhausted):
        connect(fake.target).matmul("toy/a", X, timeout=5)
    assert time.monotonic() - begun < 4
    assert len(fake.requests) == 1
