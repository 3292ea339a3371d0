"""The queue on simulated traffic: minutes of calls against an engine that follows a cost curve."""

import math
import sys
from collections import Counter
from pathlib import Path

import pytest
from service_curves import FLAT, LINEAR

from qlinear_service.cost import CostCurve
from qlinear_service.scheduling import BATCH_SECONDS, pace_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
try:
    import simulation
    from simulation import Call, Fifo, Ours, Report, Window, merged, poisson
finally:
    sys.path.pop(0)

CURVES = pytest.mark.parametrize("curve", [FLAT, LINEAR], ids=["flat", "linear"])


def run(curve: CostCurve, trace: list[Call], policy: simulation.Policy | None = None) -> Report:
    ours = Ours(pace_of(curve, 1024))
    return simulation.simulate(
        policy or ours, trace, lambda rows: curve.seconds(rows) + BATCH_SECONDS
    )


def most_rate(curve: CostCurve) -> float:
    """Rows a second in the best batches."""
    return 1 / least_row_seconds(curve)


def least_row_seconds(curve: CostCurve) -> float:
    """What a row takes in the best batches."""
    pairs = zip(curve.rows, curve.costs, strict=True)
    return min((cost + BATCH_SECONDS) / rows for rows, cost in pairs)


@CURVES
@pytest.mark.parametrize("load", [0.3, 0.9])
def test_every_call_of_poisson_traffic_is_answered_and_the_engine_keeps_up(
    curve: CostCurve, load: float
) -> None:
    trace = poisson(load * most_rate(curve), 2000 / most_rate(curve), seed=1)
    report = run(curve, trace)
    assert Counter(report.calls) == Counter(trace)
    assert sum(report.batch_rows) == len(trace)
    # The last calls wait no longer than the others: the queue does not grow.
    late = report.percentile(50, lambda call: call.at > trace[-1].at * 0.8)
    assert late < 60 * (curve.seconds(1) + BATCH_SECONDS)


@CURVES
def test_a_free_engine_begins_with_what_there_is(curve: CostCurve) -> None:
    report = run(curve, [Call(at=1.0)])
    assert report.latencies == [pytest.approx(curve.seconds(1) + BATCH_SECONDS)]


@CURVES
def test_in_bursts_nobody_waits_longer_than_in_order_of_arrival(curve: CostCurve) -> None:
    trace = simulation.bursts(0.5 * most_rate(curve), 6400 / most_rate(curve), 64, seed=4)
    ours, fifo = run(curve, trace), run(curve, trace, Fifo(1024))
    assert sum(ours.latencies) <= 1.02 * sum(fifo.latencies)
    assert ours.percentile(99) <= 1.10 * fifo.percentile(99)


@CURVES
def test_one_greedy_client_does_not_hold_up_the_others(curve: CostCurve) -> None:
    """5000 calls of one client at a moment; the others' wait some batches, not behind all."""
    polite = poisson(0.3 * most_rate(curve), 5000 / most_rate(curve), seed=1, client="polite")
    greedy = [Call(at=0.0, client="greedy")] * 5000
    trace = merged(greedy, polite)
    ours, fifo = run(curve, trace), run(curve, trace, Fifo(1024))

    def is_polite(call: Call) -> bool:
        return call.client == "polite"

    largest = pace_of(curve, 1024).seconds(max(ours.batch_rows))
    assert ours.percentile(99, is_polite) < 6 * largest
    assert ours.percentile(99, is_polite) < 0.5 * fifo.percentile(99, is_polite)
    # And it loses nothing: the engine is never idle for it.
    assert ours.seconds <= 1.05 * fifo.seconds


@CURVES
def test_greed_over_many_layers_is_no_better(curve: CostCurve) -> None:
    """The polite client's layer is nobody else's: its turn comes by rounds, not by age alone."""
    greedy = simulation.spread([Call(at=0.0, client="greedy")] * 3000, 30, seed=5)
    polite = [Call(at=1e-5, layer="m/mine", client="polite")]
    trace = merged(greedy, polite)
    ours = run(curve, trace)
    assert ours.percentile(100, lambda call: call.client == "polite") < 0.2 * ours.seconds


@CURVES
@pytest.mark.parametrize("client", ["other", "prefill"])
def test_small_calls_overtake_a_prefill(curve: CostCurve, client: str) -> None:
    """Of another client or the same one, for another layer or the same one."""
    prefill = Call(at=0.0, rows=8192, client="prefill")
    whole = 8192 * least_row_seconds(curve)
    decode = [
        Call(at=whole * (number + 0.5) / 40, layer=f"m/{'ab'[number % 2]}", client=client)
        for number in range(40)
    ]
    report = run(curve, merged([prefill], decode))
    largest = pace_of(curve, 1024).seconds(1024 if curve is FLAT else 32)
    assert report.percentile(100, lambda call: call.rows == 1) <= 3 * largest
    # The prefill itself is delayed by little more than what overtook it.
    alone = run(curve, [prefill]).latencies[0]
    cost = pace_of(curve, 1024).seconds(1)
    assert report.percentile(100, lambda call: call.rows == 8192) <= 1.1 * alone + 80 * cost


def test_the_earliest_deadline_goes_first_then_the_oldest() -> None:
    """Ten layers wait while one batch runs; two of them cannot wait long."""
    curve = LINEAR
    trace = [Call(at=0.0, layer="m/0")]
    trace += [Call(at=1e-5 * number, layer=f"m/{number}") for number in range(1, 10)]
    trace += [
        Call(at=2e-4, layer="m/10", timeout=2e-3),
        Call(at=2.1e-4, layer="m/11", timeout=1e-3),
    ]
    report = run(curve, trace)
    order = [call.layer for call in report.calls]
    assert order == ["m/0", "m/11", "m/10", *(f"m/{number}" for number in range(1, 10))]
    assert report.dropped == 0


def test_priorities_go_first() -> None:
    trace = [Call(at=0.0, layer="m/0")]
    trace += [Call(at=1e-5 * n, layer=f"m/{n}", priority=n % 3) for n in range(1, 10)]
    order = [call.priority for call in run(LINEAR, trace).calls[1:]]
    assert order == [2, 2, 2, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("flood", [{"priority": 9}, {"timeout": 0.05}])
def test_nothing_starves_behind_more_urgent_calls(flood: dict[str, float]) -> None:
    """One call without priority or deadline, and more urgent ones than the engine can do."""
    queue = simulation.WorkQueue(
        max_batch_rows=8, max_queue_rows=1 << 20, max_age_seconds=1.0, paces={}
    )
    queue.ready_at = lambda now: math.inf  # type: ignore[attr-defined]
    patient = Call(at=0.001, layer="m/patient")
    urgent = [Call(at=n * 1e-4, layer=f"m/{n % 7}", **flood) for n in range(20_000)]  # type: ignore[arg-type]
    report = simulation.simulate(queue, merged(urgent, [patient]), lambda rows: 5e-3)  # type: ignore[arg-type]
    assert report.calls.count(patient) == 1
    assert report.latencies[report.calls.index(patient)] < 0.6


def test_a_prefill_ends_even_under_a_flood_of_small_calls() -> None:
    """Its chunks have their turns as well: 2 x what the engine can do, all of another client."""
    rate = most_rate(LINEAR)
    flood = poisson(2 * rate, 20_000 / rate, seed=3, client="flood")
    report = run(LINEAR, merged([Call(at=0.0, rows=2000, client="prefill")], flood))
    place = next(i for i, call in enumerate(report.calls) if call.rows == 2000)
    assert report.latencies[place] < 3 * 2000 / rate


def test_an_adaptive_wait_fills_batches_and_is_bounded() -> None:
    """The policy of the simulation has no loop to wait in: the rule alone, on its own times."""
    queue = Ours(pace_of(FLAT, 1024), max_wait_seconds=200e-6)
    for number in range(10):
        (item,) = _items(1e-5 * number)
        queue.admit([item])
    now = 9.1e-5
    end = queue.wait_end(now)
    assert now < end <= 200e-6
    assert queue.wait_end(0.5) < 0.5  # nobody came for long
    other = _items(9.2e-5, layer="m/b")
    queue.admit(other)
    assert queue.wait_end(9.2e-5) <= 9.2e-5  # another layer is work for the meantime


def test_the_window_waits_and_fifo_does_not() -> None:
    """The rivals of the benchmark are what they say."""
    trace = [Call(at=0.0), Call(at=5e-4), Call(at=2e-3, layer="m/b")]
    assert run(FLAT, trace, Window(8, 1e-3)).batch_rows == [2, 1]
    assert run(FLAT, trace, Fifo(8)).batch_rows == [1, 1, 1]
    huge = [Call(at=0.0, rows=20), Call(at=0.0, layer="m/b"), Call(at=0.0, rows=3)]
    assert run(FLAT, huge, Window(8, 1e-3)).batch_rows == [8, 8, 7, 1]
    assert run(FLAT, huge, Fifo(8)).batch_rows == [8, 8, 4, 1, 3]


def _items(at: float, layer: str = "m/a") -> list[simulation.WorkItem]:
    return [simulation._item(round(at * 1e9) + 1 + hash(layer) % 7, Call(at=at, layer=layer))]
