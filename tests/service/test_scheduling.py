"""How many rows a batch takes and when to wait: functions of plain numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_curves import FLAT, LINEAR, curve_of

from qlinear_service.scheduling import Arrivals, pace_of, rows_to_take, unmeasured, wait_end

SIZES = st.integers(1, 5000)


@pytest.mark.parametrize("others", [0, 1000])
def test_up_to_the_sweet_spot_all_is_taken(others: int) -> None:
    pace = pace_of(FLAT, 1024)
    assert pace.sweet_rows == 32
    assert [rows_to_take(pace, m, others) for m in (1, 7, 32)] == [1, 7, 32]


def test_beyond_the_sweet_spot_only_if_that_saves_waiting() -> None:
    """Two reads of the weights against rows that cost much more: where the second is dearer."""
    dear = pace_of(curve_of({1: 100e-6, 32: 100e-6, 64: 500e-6}), 64, batch_seconds=0)
    cheap = pace_of(curve_of({1: 100e-6, 32: 100e-6, 64: 120e-6}), 64, batch_seconds=0)
    assert rows_to_take(dear, 64, 0) == 32
    assert rows_to_take(cheap, 64, 0) == 64


def test_a_longer_queue_asks_for_larger_batches() -> None:
    """Rows get cheaper in larger batches, but those are slow: worth it for many only."""
    costs = {1: 100e-6, 8: 110e-6, 64: 600e-6, 512: 3000e-6}
    pace = pace_of(curve_of(costs), 1024, batch_seconds=0)
    sizes = [rows_to_take(pace, waiting, 0) for waiting in (10, 100, 10_000, 1_000_000)]
    assert sizes == sorted(sizes)
    assert sizes[0] <= 10
    assert sizes[-1] == 512


def test_cheaper_rows_are_not_worth_any_wait() -> None:
    """An eighth cheaper, and all of the first 64 would wait seven times as long."""
    pace = pace_of(curve_of({1: 1e-4, 64: 1e-3, 512: 7e-3}), 512, batch_seconds=0)
    assert pace.most_rows == 512
    assert rows_to_take(pace, 512, 0) == 64
    assert rows_to_take(pace, 100_000, 0) == 512


def test_where_rows_cost_the_same_in_any_batch_batches_stay_small() -> None:
    """Whoever comes next waits for the batch that runs, and a larger one would gain nothing."""
    pace = pace_of(LINEAR, 1024, batch_seconds=0)
    assert rows_to_take(pace, 100_000, 0) == pace.most_rows <= 32


@given(waiting=SIZES, others=SIZES, most=st.sampled_from((1, 8, 100, 1024)))
def test_work_is_never_held_back_and_batches_keep_their_bound(
    waiting: int, others: int, most: int
) -> None:
    for curve in (FLAT, LINEAR):
        pace = pace_of(curve, most)
        rows = rows_to_take(pace, waiting, others)
        assert min(waiting, pace.sweet_rows) <= rows <= min(waiting, most)
        assert pace.sweet_rows <= most
        assert pace.chunk_rows <= most


def test_without_a_curve_batches_are_as_full_as_they_can_be() -> None:
    assert rows_to_take(unmeasured(64), 1000, 5) == 64
    assert rows_to_take(unmeasured(64), 10, 5) == 10


def test_rows_to_take_never_waits_longer_in_sum_than_the_sweet_spot_would() -> None:
    """The rule against its definition, over many queues."""
    pace = pace_of(FLAT, 1024)
    for waiting in range(33, 2000, 37):
        rows = rows_to_take(pace, waiting, 0)
        assert _sum_of_waits(pace, rows, waiting) <= 1.15 * _sum_of_waits(pace, 32, waiting)


def _sum_of_waits(pace: object, rows: int, waiting: int) -> float:
    now = total = 0.0
    while waiting:
        taken = min(rows, waiting)
        now += pace.seconds(taken)  # type: ignore[attr-defined]
        total += taken * now
        waiting -= taken
    return total


WAIT = {"oldest": 5.0, "waiting": 4, "sweet_rows": 16, "row_gap": 10e-6, "most_seconds": 200e-6}


@pytest.mark.parametrize(
    ("change", "end"),
    [
        ({}, 5.0 + 120e-6),  # until the 12 rows that fit have come
        ({"row_gap": 50e-6}, 5.0 + 200e-6),  # some of them
        ({"row_gap": 101e-6}, 5.0),  # not even two would come
        ({"row_gap": None}, 5.0),
        ({"waiting": 16}, 5.0),
        ({"most_seconds": 0.0}, 5.0),
    ],
)
def test_an_idle_engine_waits_where_calls_come_fast(change: dict[str, float], end: float) -> None:
    assert wait_end(**{**WAIT, **change}) == pytest.approx(end, abs=1e-9)  # type: ignore[arg-type]


def test_the_gap_follows_the_traffic_and_a_pause_ends_it() -> None:
    arrivals = Arrivals()
    assert arrivals.row_gap(0.0) is None
    for number in range(101):
        arrivals.note(number * 1e-3, 10)
    assert arrivals.row_gap(0.1) == pytest.approx(1e-4)
    assert arrivals.row_gap(0.6) == pytest.approx(0.5)
