"""A run of the kernel benchmark with stand-ins for GPU and library: copies, checks, sweeps, tables.

The stand-in library computes with the CPU kernels, so what it is given must be right.
"""

# ruff: noqa: E402
import ctypes
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
sys.path.insert(0, str(Path(__file__).parent))

import kernel_figures as figures
import kernel_journal as journals
import kernel_options
import kernel_plot
import kernel_report as reports
import kernel_run
from bench_stand_ins import StandInGpu, stand_in_library
from kernel_layers import checked, random_copies
from kernel_tables import print_report
from rich.console import Console

from qlinear_service.kernels.abi import LinearParams


def stand_in(
    words: list[str], path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any = None
) -> dict[str, Any]:
    """Run the measuring process' work with stand-ins and return the report."""
    monkeypatch.setattr(kernel_run, "Gpu", StandInGpu)
    monkeypatch.setattr(kernel_run, "floor_sizes", lambda cells: [0.25, 0.5])
    monkeypatch.setattr(figures, "FILL_BYTES", 1 << 16)

    monkeypatch.setattr(kernel_run, "Library", lambda file, gpu: stand_in_library(gpu, spoil))
    options = replace(kernel_options.parse(words), journal=path)
    kernel_run.Runner(options, journals.Journal(path), path).run()
    return reports.build_report(journals.Journal(path))


QUICK = ["--shapes", "256x128,384x64", "--rows", "1,9", "--replays", "3"]


def test_a_run_from_copies_to_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*QUICK, "--peers", "cublas", "--also", "dependent,as-A10"]
    report = stand_in(words, tmp_path / "journal", monkeypatch)
    assert len(report["cells"]) == 2 * 2 * 5
    assert (report["failures"], report["wrong"], reports.is_bad(report)) == ({}, [], False)
    first = report["cells"][0]
    assert list(first["results"]) == [
        *("qlinear", "qlinear dependent", "qlinear as-A10", "cuBLAS nk", "cuBLAS kn", "cuBLAS"),
    ]
    ours, cublas = first["results"]["qlinear"], first["results"]["cuBLAS"]
    assert ours["ratio"] == pytest.approx(first["floor_us"] / ours["us"])
    assert ours["detail"]["plan"]["stages"] == 4
    assert first["results"]["qlinear as-A10"]["detail"]["plan"]["shared_bytes"] <= 99 << 10
    assert cublas["us"] == min(first["results"][f"cuBLAS {order}"]["us"] for order in ("nk", "kn"))
    json.dumps(reports.as_json(report))
    tables = io.StringIO()
    print_report(Console(file=tables, width=160), report)
    titles = ["Reading, us", "bf16: us", "8bit: us", "Geometric means", "\nf16: us"]
    places = [tables.getvalue().index(title) for title in titles]
    assert places == sorted(places)
    drawn = kernel_plot.lines(report["geomeans"])
    assert {len(points) for points in drawn.values()} == {2}
    assert {"qlinear", "cuBLAS", "qlinear dependent", "qlinear, zp"} <= drawn.keys()
    # All is done: a process that is started again has nothing left to do.
    assert len(stand_in(words, tmp_path / "journal", monkeypatch)["cells"]) == 20


def test_what_is_wrong_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(params: LinearParams) -> None:
        if params.m == 9:
            ctypes.memset(params.y, 0, 2 * params.n)

    words = [*QUICK, "--peers", "none", "--variants", "zp"]
    report = stand_in(words, tmp_path / "journal", monkeypatch, spoil)
    assert reports.is_bad(report)
    assert len(report["wrong"]) == 2
    for found in report["cells"]:
        assert ("us" in found["results"]["qlinear"]) == (found["m"] == 1)


def test_a_step_that_failed_is_left_out_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    journals.Journal(path).fail("f16/256x128/9/qlinear", "the process died of signal 11")
    journals.Journal(path).fail("f16/384x64/1/timing", "no end within 45 s: killed")
    report = stand_in([*QUICK, "--peers", "cublas", "--variants", "f16"], path, monkeypatch)
    found = {cell["key"]: cell["results"] for cell in report["cells"]}
    assert found.keys() == {"f16/256x128/1", "f16/256x128/9", "f16/384x64/9"}
    assert found["f16/256x128/9"]["qlinear"] == {"failed": "the process died of signal 11"}
    assert "us" in found["f16/256x128/9"]["cuBLAS nk"]
    assert reports.is_bad(report)


def test_a_sweep_tries_plans_and_shows_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--sweep", "--shapes", "256x128", "--rows", "9", "--replays", "3"]
    words += ["--sweep-seconds", "0.5"]
    report = stand_in(words, tmp_path / "journal", monkeypatch)
    assert not report["failures"]
    (sweep,) = report["sweeps"]
    assert sweep["tried"] > 3
    assert sweep["refused"] > 0
    assert sweep["own"] in [row["text"] for row in sweep["finals"]]
    assert all(not row["wrong"] and row["ratio"] > 0 for row in sweep["finals"])
    tables = io.StringIO()
    print_report(Console(file=tables, width=160), report)
    assert sweep["finals"][0]["text"] in tables.getvalue().partition("Best plans")[2]
    assert reports.is_bad(report) is False


def test_random_copies_have_weights_of_their_own() -> None:
    small = figures.Shape("256x128", 256, 128)
    first, second = random_copies(StandInGpu(), small, figures.VARIANTS["8bit"], 2)
    assert first.qweight.shape == (8, 4, 1024)
    assert first.scales.shape == (8, 2, 16)
    assert not torch.equal(first.qweight, second.qweight)
    assert not torch.equal(first.scales, second.scales)
    apart = second.scales.data_ptr() - first.scales.data_ptr()
    assert apart % figures.COPY_ALIGN_BYTES == 0
    assert apart >= first.scales.numel() * 2


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_random_scales_are_small_and_positive(kind: str) -> None:
    (piece,) = StandInGpu().copies(kind, 4096, 1)
    values = piece.view(getattr(torch, kind)).float()
    assert 0.0049 < float(values.min()) < float(values.max()) < 0.0152


def test_results_that_were_there_before_do_not_count() -> None:
    cell = figures.Cell(figures.VARIANTS["f16"], figures.Shape("256x128", 256, 128), 2)
    (copy,) = random_copies(StandInGpu(), cell.shape, cell.variant, 1)
    x = torch.randn((2, 256)).half()
    y = (x.double() @ copy.columns(torch.arange(8))).half()
    right = y.clone()
    assert checked(cell, x, y, copy, lambda: y.copy_(right))[1] == ""
    assert checked(cell, x, y, copy, lambda: None)[1].startswith("256 of 256 results")


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        *(("floor", True), ("f16/l7b.o/8/timing", True), ("f16/l7b.o/8/Humming", False)),
        *(("Humming", False), ("f16/l7b.o/8/cuBLAS nk", False)),
    ],
)
def test_only_failures_of_ours_are_bad(key: str, bad: bool, tmp_path: Path) -> None:
    journal = journals.Journal(tmp_path / "journal")
    journal.fail(key, "why")
    assert reports.is_bad(reports.build_report(journal)) is bad
