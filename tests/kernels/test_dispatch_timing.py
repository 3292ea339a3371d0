"""Which batches of the native dispatcher are timed, and how their results go out."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from dispatch_bench import PLAIN_NAME, Make, check, rows

from qlinear_service.errors import EngineFailure
from qlinear_service.gpu import direct


def histogram_count(bench: Any) -> int:
    """Return how many computations the histogram of their seconds has."""
    (metric,) = (one for one in bench.metrics.collect() if one.name == "qlinear_kernel_seconds")
    return int(sum(one.value for one in metric.samples if one.name.endswith("_count")))


async def test_of_many_batches_few_are_timed_and_long_rows_are_copied(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "TIMED_EACH", 3)
    monkeypatch.setattr(direct, "COPIED_ROW_BYTES", 1)
    bench = make(max_batch_rows=1)
    seen: list[bool] = []
    count = bench.metrics.batch_finished

    def finished(layer: str, **told: Any) -> None:
        seen.append(told["is_timed"])
        assert bool(told["transfers"]) == seen[-1]
        count(layer, **told)

    monkeypatch.setattr(bench.metrics, "batch_finished", finished)
    bench.library.fake_hang(1)
    told = [bench.call(rows(1)) for _ in range(40)]
    bench.library.fake_hang(0)
    for one in told:
        (outcome,) = await one
        check(outcome, rows(1), PLAIN_NAME)
        assert outcome.kernel_nanoseconds > 0, "of another batch, where it was not timed itself"
    await bench.all_left()
    assert seen[0], "the first is alone"
    assert 10 <= seen.count(False) <= 28, "two of three of those that are not"
    assert 20 <= bench.library.fake_part_copies() < 40, "a lone batch is scattered by a kernel"
    (live,) = bench.metrics.live()
    assert live.launches == len(seen), "those that were not timed count, too"
    assert histogram_count(bench) == seen.count(True)


@pytest.mark.parametrize("all_timed", [True, False])
async def test_servers_time_few_of_many_and_copy_no_short_rows(
    make: Make, monkeypatch: pytest.MonkeyPatch, all_timed: bool
) -> None:
    if all_timed:
        monkeypatch.setattr(direct, "TIMED_EACH", 1)
    bench = make(max_batch_rows=1)
    bench.library.fake_hang(1)
    told = [bench.call(rows(1)) for _ in range(20)]
    bench.library.fake_hang(0)
    for one in told:
        check((await one)[0], rows(1), PLAIN_NAME)
    await bench.all_left()
    (live,) = bench.metrics.live()
    assert live.launches == 20
    assert histogram_count(bench) == 20 if all_timed else 1 <= histogram_count(bench) < 10
    assert bench.library.fake_part_copies() == 0


@pytest.mark.parametrize("copied", [0, 1])
async def test_what_fails_before_results_are_copied_is_tried_call_by_call(
    make: Make, monkeypatch: pytest.MonkeyPatch, copied: int
) -> None:
    monkeypatch.setattr(direct, "COPIED_ROW_BYTES", copied)
    bench = make(max_batches_in_flight=2, spins=True)  # one thread: one ends, then one is sent
    bench.library.fake_hang(1)
    told = [bench.call(rows(0))]
    await asyncio.sleep(0.01)
    told.append(bench.call(rows(1)))
    await asyncio.sleep(0.01)
    told += [bench.call(rows(seed)) for seed in range(2, 6)]  # one batch, when there is room
    await asyncio.sleep(0.05)
    bench.library.fake_fail(1)
    bench.library.fake_hang(0)
    for seed, one in enumerate(told):
        check((await one)[0], rows(seed), PLAIN_NAME)
    await bench.all_left()


async def test_what_fails_while_results_are_copied_is_not_tried_on_what_they_may_lie_over(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "COPIED_ROW_BYTES", 1)
    bench = make(max_batches_in_flight=2, spins=True)  # one thread: one ends, then one is sent
    bench.library.fake_hang(1)
    told = [bench.call(rows(0))]
    await asyncio.sleep(0.01)
    told.append(bench.call(rows(1)))
    while bench.library.fake_part_copies() < 1:  # the first is alone: a kernel scatters it
        await asyncio.sleep(0.001)
    told += [bench.call(rows(seed)) for seed in range(2, 6)]  # one batch, when there is room
    await asyncio.sleep(0.05)
    bench.library.fake_fail_scatters(1)
    bench.library.fake_hang(0)
    for seed, one in enumerate(told[:2]):
        check((await one)[0], rows(seed), PLAIN_NAME)
    for one in told[2:]:
        with pytest.raises(EngineFailure):
            await one
    check((await bench.call(rows(9)))[0], rows(9), PLAIN_NAME)
    await bench.all_left()
