"""Dequantized weights and a dense product as a contestant, with stand-ins for GPU and library."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import kernel_dequantized
from bench_stand_ins import StandInGpu, stand_in_library
from kernel_dequantized import Dequantized
from kernel_figures import SHAPES, VARIANTS, Cell, Shape
from kernel_layers import Prepared
from kernel_report import is_bad
from test_bench_kernel_run import stand_in

CELL = Cell(VARIANTS["f16"], Shape("256x640", 256, 640), 5)


@pytest.fixture
def slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of 1 "MiB" hold 256 features of 256 weights."""
    monkeypatch.setattr(kernel_dequantized, "MIB", 256 * 256 * 2)


def prepared(slab_mib: int | None) -> tuple[Prepared, torch.Tensor, list[tuple[int, int]]]:
    gpu = StandInGpu()
    library = stand_in_library(gpu)
    x, y = torch.randn((CELL.m, 256)).half(), torch.empty((CELL.m, 640)).half()
    found = Dequantized(gpu, library, slab_mib).prepare(CELL, x, y)
    return found, y, library.functions.slabs  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("slab_mib", "slabs"), [(1, [(0, 256), (256, 256), (512, 128)]), (None, [(0, 640)])]
)
def test_every_feature_is_computed_once_and_right(
    slab: None, slab_mib: int | None, slabs: list[tuple[int, int]]
) -> None:
    found, _, dequantized = prepared(slab_mib)
    assert found.wrong == ""
    assert found.error is not None
    assert 1e-5 < found.error < 5e-4, "weights and results are rounded"
    assert dequantized == 2 * slabs  # the first and the last copy were checked
    assert found.detail == {"slabs": len(slabs), "features": slabs[0][1]}


def test_a_slab_that_is_left_out_is_noticed(slab: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dequantized, "slabs", lambda self, cell: [(0, 256), (256, 256)])
    assert prepared(1)[0].wrong.startswith("640 of 3200 results are not finite")


def test_slabs_fit_and_are_whole_tiles() -> None:
    for shape in SHAPES.values():
        for mib in (16, 32):
            cell = Cell(VARIANTS["f16"], shape, 1024)
            slabs = Dequantized(StandInGpu(), stand_in_library(StandInGpu()), mib).slabs(cell)
            assert sum(width for _, width in slabs) == shape.n
            assert all(width * shape.k * 2 <= mib << 20 for _, width in slabs)
            assert all(begin % 256 == 0 for begin, _ in slabs)


def test_it_competes_from_1024_rows_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--shapes", "256x128", "--rows", "9,1024", "--replays", "3", "--variants", "f16"]
    report = stand_in([*words, "--peers", "dequantized"], tmp_path / "journal", monkeypatch)
    few, many = (cell["results"] for cell in report["cells"])
    names = ["dequantized 16 MiB", "dequantized 32 MiB", "dequantized whole"]
    assert list(few) == ["qlinear"]
    assert list(many) == ["qlinear", *names]
    assert all("us" in many[name] for name in names)
    assert {row["name"] for row in report["geomeans"] if row["m"] == 1024} == {"qlinear", *names}


@pytest.mark.parametrize("fault", ["wrong", "failed"])
def test_its_faults_are_ours(fault: str) -> None:
    results = {"qlinear": {"us": 1.0}, "dequantized whole": {fault: "why"}}
    assert is_bad({"cells": [{"results": results}], "failures": {}})
