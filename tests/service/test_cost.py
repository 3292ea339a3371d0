"""Cost curves alone: noise is taken off, and the sweet spot and the capacity follow."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlinear_service.cost import CostCurve, Steps


def curve_of(costs: dict[int, float]) -> CostCurve:
    return CostCurve(steps=tuple(Steps(m, 0.0, cost, 0.0) for m, cost in costs.items()))


def test_the_longest_step_is_the_cost() -> None:
    steps = (Steps(1, 3.0, 2.0, 1.0), Steps(2, 1.0, 4.0, 2.0), Steps(4, 1.0, 2.0, 9.0))
    assert CostCurve(steps=steps).costs == (3.0, 4.0, 9.0)


def test_the_sweet_spot_is_the_most_rows_for_a_tenth_more() -> None:
    curve = curve_of({1: 10.0, 8: 10.5, 16: 11.0, 32: 11.2, 64: 20.0})
    assert curve.sweet_spot_rows == 16
    assert curve.capacity_rows_per_second == pytest.approx(16 / 11.0)
    assert curve_of({1: 1.0, 2: 2.0}).sweet_spot_rows == 1


def test_a_single_slow_measure_does_not_hide_that_more_rows_were_quicker() -> None:
    curve = curve_of({1: 50.0, 8: 10.0, 16: 90.0, 32: 10.5, 64: 30.0})
    assert curve.costs == (10.0, 10.0, 10.5, 10.5, 30.0)
    assert curve.sweet_spot_rows == 32


def test_between_measures_lies_a_line_and_beyond_the_last_its_rate() -> None:
    curve = curve_of({1: 10.0, 8: 12.0, 16: 20.0})
    assert [curve.seconds(m) for m in (1, 8, 12, 16, 32)] == [10.0, 12.0, 16.0, 20.0, 40.0]


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8))
def test_more_rows_never_cost_less(costs: list[float]) -> None:
    curve = curve_of({2**i: cost for i, cost in enumerate(costs)})
    found = [curve.seconds(m) for m in range(1, 300)]
    assert found == sorted(found)
    assert curve.sweet_spot_rows in curve.rows


@pytest.mark.parametrize(
    "costs",
    [{}, {2: 1.0}, {1: 1.0, 8: 0.0}, {1: math.inf}, {1: math.nan}, {1: 1.0, 8: 2.0, 4: 1.0}],
)
def test_what_is_no_curve_is_refused(costs: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="a cost curve has"):
        curve_of(costs)
