"""The chaos suite's own checks find what they are there for."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from chaos import ledger as ledgers
from chaos.ledger import Away, Ledger
from chaos.models import chaos_layers
from chaos.truth import DTYPES, POOL_ROWS, Array, Truth, numbers_from

from qlinear_client import CallError, Internal, InvalidArgument, ResourceExhausted, Unavailable
from qlinear_service.dtypes import DType
from qlinear_service.kernels import reference
from qlinear_service.kernels.torch_types import to_torch

LAYER = "one/up"
OK = frozenset({"OK"})


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(chaos_layers(), seed=3)


def answer_of(truth: Truth, numbers: Array) -> Array:
    """Return what the server should answer to float16 rows."""
    x = torch.from_numpy(truth.rows(LAYER, DType.F16, numbers))
    y = reference.linear(truth.layers[LAYER], x.to(to_torch(DType.F16)))
    return y.numpy().copy()


def problem(truth: Truth, y: Array, numbers: Array, *, same_bits: bool = False) -> str:
    return truth.problem(LAYER, DType.F16, y, numbers, same_bits=same_bits)


def test_a_right_answer_is_right_and_one_wrong_element_is_found(truth: Truth) -> None:
    numbers = numbers_from(POOL_ROWS - 3, 6)
    y = answer_of(truth, numbers)
    assert problem(truth, y, numbers) == ""
    y[4, 7] += 0.05
    assert "y[4, 7] of row 1" in problem(truth, y, numbers)
    y[4, 7] = np.nan
    assert "y[4, 7]" in problem(truth, y, numbers)


def test_rows_of_another_call_are_found(truth: Truth) -> None:
    for number in range(POOL_ROWS):
        other = answer_of(truth, numbers_from(number + 1, 1))
        assert problem(truth, other, numbers_from(number, 1)), number


def test_another_shape_or_dtype_is_found(truth: Truth) -> None:
    numbers = numbers_from(0, 4)
    y = answer_of(truth, numbers)
    assert "expected (4, 40)" in problem(truth, y[:3], numbers)
    assert "expected (4, 40)" in problem(truth, y.astype(np.float64), numbers)


def test_other_bits_are_found_where_bits_are_promised(truth: Truth) -> None:
    truth.forget_bits()
    numbers = numbers_from(10, 2)
    y = answer_of(truth, numbers)
    assert problem(truth, y, numbers, same_bits=True) == ""
    y[1, 0] = np.nextafter(y[1, 0], np.float16(1000))
    assert problem(truth, y, numbers) == ""
    assert "1 of 2 rows have other bits" in problem(truth, y, numbers, same_bits=True)


def test_the_number_of_each_row_is_exact_in_every_dtype(truth: Truth) -> None:
    """The injected failures tell calls apart by it."""
    for dtype in DTYPES:
        first = truth.rows(LAYER, dtype, np.arange(POOL_ROWS))[:, 0].astype(np.float32) * 64
        assert (np.diff(first) == 1).all()


async def ended(ledger: Ledger, outcome: Any) -> str:
    """Let one call end so, and return the code."""

    async def call() -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return await outcome if asyncio.iscoroutine(outcome) else outcome

    code, _ = await ledger.end_of("kind", call(), OK)
    return code


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (InvalidArgument("no"), "ended with INVALID_ARGUMENT"),
        (Unavailable("gone"), "ended with UNAVAILABLE"),
        (ResourceExhausted("full"), "comes without a pause"),
        (ResourceExhausted("full", retry_after_seconds=0.1), ""),
        (Internal("it broke"), "names no incident"),
        (CallError("what", code=grpc.StatusCode.UNKNOWN), "ended with UNKNOWN"),
        (asyncio.CancelledError(), "ended with CANCELLED"),
    ],
)
async def test_an_end_that_must_not_be_is_found(error: BaseException, found: str) -> None:
    ledger = Ledger(lambda began: Away.NEVER)
    await ended(ledger, error)
    ledger.check_sum()
    assert (ledger.sent, ledger.failed) == (1, 1)
    assert any(found in text for text in ledger.problems) if found else not ledger.problems


async def test_while_the_server_is_away_calls_may_be_unavailable() -> None:
    ledger = Ledger(lambda began: Away.IN_ORDER)
    assert await ended(ledger, Unavailable("gone")) == "UNAVAILABLE"
    assert not ledger.problems


@pytest.mark.parametrize("away", Away)
async def test_only_a_server_that_is_killed_cuts_calls_off(away: Away) -> None:
    ledger = Ledger(lambda began: away)
    await ended(ledger, Unavailable("recvmsg: Connection reset by peer"))
    assert bool(ledger.problems) == (away is not Away.KILLED)


async def test_a_call_without_an_end_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "LOST_SECONDS", 0.05)
    ledger = Ledger(lambda began: Away.IN_ORDER)
    assert await ended(ledger, asyncio.sleep(60)) == "lost"
    ledger.check_sum()
    assert any("ended with lost" in text for text in ledger.problems)
    assert any("1 sent, 0 answered, 0 failed" in text for text in ledger.problems)
