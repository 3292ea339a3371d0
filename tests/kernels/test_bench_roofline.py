"""The roofline: where points and roofs lie, and figures of an earlier run that are drawn again."""

# ruff: noqa: E402
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import kernel
import kernel_roofline
from kernel_figures import Cell, Shape, moved_bytes, parse_variants

SHAPE = Shape("256x128", 256, 128)


def record(m: int, us: dict[str, float], variant: str = "f16") -> dict[str, Any]:
    """Return a cell of a report."""
    cell = Cell(parse_variants(variant)[0], SHAPE, m)
    operations = 2 * m * SHAPE.k * SHAPE.n
    results = {
        name: {"us": each, "ratio": 0.5, "tflops": operations / each / 1e6, "gb_per_s": 1.0}
        for name, each in us.items()
    }
    where = {"key": cell.key, "variant": variant, "shape": SHAPE.name, "k": SHAPE.k, "n": SHAPE.n}
    return where | {"m": m, "bytes": moved_bytes(cell), "floor_us": 1.0, "results": results}


def a_report() -> dict[str, Any]:
    cells = [
        record(1, {"qlinear": 2.0, "cuBLAS": 4.0}),
        record(64, {"qlinear": 3.0, "cuBLAS": 6.0}),
        record(1, {"qlinear": 2.0}, "bf16"),
    ]
    point = {"mib": 1.0, "us": 0.5, "kernel": 0, "reference_us": 0.5, "ratio": 1.0}
    return {
        "facts": {"gpu": "a GPU", "time": "2026-11-30T00:00", "commit": "c0ffee"},
        "floor_measured": True,
        "floor": [point | {"gb_per_s": 2000.0}, point | {"gb_per_s": 4000.0}],
        "empty_us": [1.0],
        "peak_tflops": 800.0,
        "cells": cells,
        **{name: [] for name in ("states", "notes", "geomeans", "sweeps", "wrong")},
        "failures": {},
        "left": 0,
    }


def test_points_lie_where_bytes_and_times_put_them() -> None:
    drawn = kernel_roofline.points(a_report()["cells"])
    assert {name: [point.m for point in some] for name, some in drawn.items()} == {
        "qlinear": [1, 64],
        "cuBLAS": [1, 64],
    }
    operations, rows = 2 * 64 * 256 * 128, 64 * (256 + 128) * 2
    ours, cublas = drawn["qlinear"][1], drawn["cuBLAS"][1]
    packed = 256 * 128 // 2 + 128 * 2 * 2  # codes and scales
    assert ours.operations_per_byte == pytest.approx(operations / (packed + rows))
    assert cublas.operations_per_byte == pytest.approx(operations / (2 * 256 * 128 + rows))
    assert ours.tflops == pytest.approx(2 * cublas.tflops)
    assert ours.tflops == pytest.approx(operations / 3e-6 / 1e12)


def test_roofs_are_the_largest_read_rate_and_the_product_rate() -> None:
    report = a_report()
    assert kernel_roofline.roofs(report) == (4.0, 800.0)
    read_tb, _ = kernel_roofline.roofs(report | {"floor": []})
    assert 4.0 < read_tb < 4.8, "the reference, in TB/s"


def test_figures_of_an_earlier_run_are_drawn_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    figures, picture, again = tmp_path / "all.json", tmp_path / "roofline.svg", tmp_path / "b.json"
    figures.write_text(json.dumps(a_report()))
    words = ["--from-json", str(figures), "--roofline", str(picture), "--json", str(again)]
    assert kernel.main(words) == 0
    assert "f16: us (floor / measured)" in capsys.readouterr().out
    drawn = picture.read_text()
    assert drawn.startswith("<?xml")
    assert drawn.count("PathCollection") == 4 + 2  # two contestants, two M, and the legend
    assert json.loads(again.read_text())["cells"] == a_report()["cells"]


def test_a_bad_file_and_a_bad_name_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert kernel.main(["--from-json", str(other)]) == kernel.USAGE
    assert f"{other} is no JSON of this benchmark" in capsys.readouterr().err
    assert kernel.main(["--from-json", str(tmp_path / "none")]) == kernel.USAGE
    with pytest.raises(SystemExit):
        kernel.main(["--roofline", "x.gif"])
    assert "--roofline x.gif: expected a name that ends in .png or .svg" in capsys.readouterr().err
    bad = a_report()
    bad["cells"][0]["results"]["qlinear"]["wrong"] = "all of it"
    other.write_text(json.dumps(bad))
    assert kernel.main(["--from-json", str(other)]) == 1
