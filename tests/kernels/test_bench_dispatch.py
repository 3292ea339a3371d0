"""`qlinear bench dispatch`: what its two tables say of cases that are known beforehand."""

import ctypes
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import dispatcher
from dispatcher import Device

FREE = {"start_batch": 0.0, "start_row": 0.0, "end_batch": 0.0, "end_row": 0.0}
ROWS = 20_000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return dispatcher.build(tmp_path_factory.mktemp("dispatcher"))


def rows_per_batch(library: ctypes.CDLL, device: Device) -> dict[tuple[float, int], float]:
    found = dispatcher.timeline(library, device, FREE, 400e3, rows=ROWS)
    assert all(one["answered"] <= 1.1 * 400e3 * one["load"] for one in found)
    return {(one["load"], one["threads"]): one["rows_per_batch"] for one in found}


def test_a_device_that_is_busy_with_products_gets_what_came_meanwhile(
    library: ctypes.CDLL,
) -> None:
    found = rows_per_batch(library, Device(send=1e-6, end=1e-6, product=20e-6))
    assert found[1.0, 1] == pytest.approx(8, rel=0.05), "400,000 rows a second for 20 µs"
    assert found[0.5, 2] == pytest.approx(4, rel=0.05)


def test_one_thread_takes_the_sum_of_both_works_two_the_longer_one(library: ctypes.CDLL) -> None:
    found = rows_per_batch(library, Device(send=20e-6, end=10e-6, product=1e-6))
    assert found[1.0, 1] == pytest.approx(12, rel=0.05)
    assert found[1.0, 2] == pytest.approx(8, rel=0.05)


def test_steps_that_run_in_turn_take_their_sum(library: ctypes.CDLL) -> None:
    device = Device(send=1e-6, end=0, product=20e-6, moving=5e-6, in_turn=1)
    assert rows_per_batch(library, device)[1.0, 1] == pytest.approx(12, rel=0.05)


def test_costs_are_split_into_batches_and_rows(library: ctypes.CDLL) -> None:
    few, many = dispatcher.FITTED
    steps = dict.fromkeys(dispatcher.STEPS, 0.0)
    took = {
        few: {**steps, "start": 100 + 30.0 * few, "end": 50 + 7.0 * few},
        many: {**steps, "start": 100 + 30.0 * many, "end": 50 + 7.0 * many},
    }
    expected = {"start_batch": 100, "start_row": 30, "end_batch": 50, "end_row": 7}
    assert dispatcher.own_of(took) == pytest.approx(expected)
    measured = dispatcher.costs(library, batches=200, runs=1)
    assert all(one["start"] > 0 and one["end"] > 0 for one in measured.values())


def test_all_figures_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    written = tmp_path / "figures.json"
    dispatcher.main(
        ["--batches", "50", "--runs", "1", "--rows", "2000", "--json", str(written), "--in-turn"]
    )
    told = capsys.readouterr().out
    assert "ns a batch; to start one" in told
    assert "send 12, end 4, product 17, in_row 0.15, out_row 1.05, moving 4, one batch" in told
    report = json.loads(written.read_text())
    assert len(report["timeline"]) == len(dispatcher.LOADS) * len(dispatcher.THREADS)
    assert report["in_turn"] is True
