"""Measuring cost curves: what is measured, in which time, and what a cache folder may be like."""

import errno
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu
from random_layers import random_layer

from qlinear_service.config import TRANSFERS
from qlinear_service.cost import TILE_EDGES, Steps
from qlinear_service.curves import HostStepper, cost_curves, measure_curves
from qlinear_service.gpu.stepper import DeviceStepper
from qlinear_service.gpu.ways import PINNED
from qlinear_service.kernels.backends import TorchKernels
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import QuantizedLinear

A, B, C = (
    pack(random_layer(n=n, k=64, module=name)) for name, n in (("a", 64), ("b", 64), ("c", 128))
)
NEVER = threading.Event()


class Scripted:
    """Batches that take a made-up time on a made-up clock."""

    def __init__(self, seconds_of: Any) -> None:
        self.now = 0.0
        self.asked: list[tuple[str, int]] = []
        self.seconds_of = seconds_of

    def clock(self) -> float:
        return self.now

    def steps(self, layer: QuantizedLinear, rows: int) -> Steps:
        self.asked.append((layer.spec.module, rows))
        seconds = self.seconds_of(rows, len(self.asked))
        self.now += seconds
        return Steps(rows, 0.0, seconds, 0.0)


def measured(stepper: Scripted, by_shape: dict[str, list[QuantizedLinear]], seconds: float) -> Any:
    return measure_curves(stepper, by_shape, most_seconds=seconds, stop=NEVER, clock=stepper.clock)


def curves(stepper: Any, folder: Path, *layers: QuantizedLinear, **more: Any) -> Any:
    given = {"device": "cpu: test", "most_seconds": 10.0, "stop": NEVER, **more}
    return cost_curves(stepper, layers, cache_dir=folder, **given)


def test_each_shape_is_measured_at_all_tile_edges_and_layers_take_turns() -> None:
    stepper = Scripted(lambda rows, number: rows * 1e-6)
    found = measured(stepper, {"one": [A, B], "two": [C]}, 10.0)
    assert found["one"].rows == found["two"].rows == TILE_EDGES
    assert {module for module, _ in stepper.asked} == {"a", "b", "c"}
    assert found["one"].costs == pytest.approx([rows * 1e-6 for rows in TILE_EDGES])


def test_the_best_of_several_tries_in_several_passes_counts() -> None:
    """Other work makes all of the first pass ten times as long, and four of five tries later."""
    first_pass = 5 * len(TILE_EDGES)
    stepper = Scripted(
        lambda rows, number: 1e-4 if number % 5 == 0 and number > first_pass else 1e-3
    )
    (curve,) = measured(stepper, {"one": [A]}, 10.0).values()
    assert curve.costs == pytest.approx([1e-4] * len(TILE_EDGES))


@pytest.mark.parametrize("budget", [0.5, 3.0, 10.0])
def test_the_time_is_kept_and_few_rows_come_first(budget: float) -> None:
    stepper = Scripted(lambda rows, number: rows * 10e-3)
    shapes = {str(number): [A] for number in range(5)}
    found = measured(stepper, shapes, budget)
    assert stepper.now <= budget + 0.1
    assert len(found) == 5
    assert all(curve.rows[0] == 1 and len(curve.rows) < len(TILE_EDGES) for curve in found.values())


def test_a_stop_ends_it() -> None:
    stop = threading.Event()
    stop.set()
    stepper = Scripted(lambda rows, number: 1.0)
    assert measure_curves(stepper, {"one": [A]}, most_seconds=10, stop=stop) == {}
    assert stepper.asked == []


def test_a_full_device_ends_the_curve_and_nothing_else() -> None:
    def seconds_of(rows: int, number: int) -> float:
        if rows > 64:
            raise torch.OutOfMemoryError("full")
        return 1e-6 * rows

    (curve,) = measured(Scripted(seconds_of), {"one": [A]}, 10.0).values()
    assert curve.rows[-1] == 64


def test_the_next_start_measures_what_is_new_only(tmp_path: Path) -> None:
    first, second = (Scripted(lambda rows, number: rows * 1e-6) for _ in range(2))
    before = curves(first, tmp_path, A)
    assert set(before) == {A.spec.shape}
    after = curves(second, tmp_path, A, B, C)
    assert {module for module, _ in second.asked} == {"c"}
    assert after[A.spec.shape] == before[A.spec.shape]
    assert set(curves(first, tmp_path, C)) == {C.spec.shape}


def test_sizes_that_the_time_did_not_suffice_for_are_measured_at_the_next_start(
    tmp_path: Path,
) -> None:
    first, second = (Scripted(lambda rows, number: rows * 10e-6) for _ in range(2))
    short = curves(first, tmp_path, A, most_seconds=0.001, clock=first.clock)[A.spec.shape]
    assert 1 < len(short.rows) < len(TILE_EDGES)
    whole = curves(second, tmp_path, A, clock=second.clock)[A.spec.shape]
    assert whole.rows == TILE_EDGES
    assert {rows for _, rows in second.asked} == set(TILE_EDGES) - set(short.rows)


def test_what_a_stop_has_cut_short_is_not_kept(tmp_path: Path) -> None:
    stop = threading.Event()

    def seconds_of(rows: int, number: int) -> float:
        if rows == 16:
            stop.set()
        return rows * 1e-6

    assert curves(Scripted(seconds_of), tmp_path, A, stop=stop)
    assert not (tmp_path / "curves").exists()


def test_another_device_has_other_curves(tmp_path: Path) -> None:
    first, second = (Scripted(lambda rows, number: rows * 1e-6) for _ in range(2))
    curves(first, tmp_path, A)
    curves(second, tmp_path, A, device="cpu: 2 threads")
    assert second.asked
    assert len(list((tmp_path / "curves").iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace("test", "tost"),
        lambda text: text.replace("[[1,", "[[3,"),
        lambda text: text.replace("[[1,", "[[1e400,"),
        lambda text: "[" * 100_000,
        lambda text: json.dumps({**json.loads(text), "shapes": {A.spec.shape: [[1, 0, 1e306, 0]]}}),
        lambda text: json.dumps({**json.loads(text), "shapes": {A.spec.shape: [[1, 0, 0, 0]]}}),
        lambda text: json.dumps({**json.loads(text), "shapes": {A.spec.shape: [[1, "x"]]}}),
        lambda text: json.dumps({**json.loads(text), "format": 0}),
    ],
)
def test_a_damaged_file_is_measured_anew(tmp_path: Path, damage: Any) -> None:
    curves(Scripted(lambda rows, number: rows * 1e-6), tmp_path, A)
    (file,) = (tmp_path / "curves").iterdir()
    file.write_text(damage(file.read_text()))
    again = Scripted(lambda rows, number: rows * 2e-6)
    assert curves(again, tmp_path, A)[A.spec.shape].costs[0] == pytest.approx(2e-6)
    third = Scripted(lambda rows, number: 1.0)
    assert curves(third, tmp_path, A)[A.spec.shape].costs[0] == pytest.approx(2e-6)
    assert third.asked == []


def test_a_cache_that_cannot_be_written_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    assert curves(Scripted(lambda rows, number: rows * 1e-6), blocked, A)
    assert "curves_not_kept" in caplog.text
    absent = tmp_path / "not" / "there"
    assert curves(Scripted(lambda rows, number: rows * 1e-6), absent, A)
    assert (absent / "curves").is_dir()


def test_a_full_disk_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(written: Path, final: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("qlinear_service.curves.publish", full)
    assert curves(Scripted(lambda rows, number: rows * 1e-6), tmp_path, A)
    assert list((tmp_path / "curves").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_is_fine(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert curves(Scripted(lambda rows, number: rows * 1e-6), tmp_path, A)


def test_the_real_kernels_of_the_host_give_a_curve() -> None:
    found = measure_curves(HostStepper(TorchKernels()), {"a": [A]}, most_seconds=0.5, stop=NEVER)
    curve = found["a"]
    assert curve.rows[0] == 1
    assert all(step.kernel_seconds > 0 for step in curve.steps)
    assert all(step.copy_in_seconds > 0 for step in curve.steps)


@pytest.mark.parametrize("mode", TRANSFERS)
def test_a_gpu_gives_its_own_times_of_all_three_steps(mode: str) -> None:
    """On a device made of threads, which says 1, 5 and 2 µs of whatever runs."""
    gpu = FakeGpu()
    steps = DeviceStepper(gpu, mode).steps(A, 24)
    assert [trip.way.gather for trip in gpu.trips] == [mode != PINNED]
    assert steps == Steps(24, 1e-6, 5e-6, 2e-6)
    assert [gpu.count(step) for step in ("copy_in", "kernel", "copy_out")] == [1, 1, 1]
    found = measure_curves(DeviceStepper(gpu), {"a": [A]}, most_seconds=2, stop=NEVER)
    assert set(found["a"].costs) == {5e-6}
