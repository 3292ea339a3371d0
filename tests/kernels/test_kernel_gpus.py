"""What is counted for GPUs that could not be had: from listings typed here and the real planner."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import kernel_gpus
from kernel_sass import Kernel, parse_code

from qlinear_service.kernels.library_cache import default_cache_dir
from qlinear_service.kernels.planner import load_planner
from qlinear_service.planning.report import Shape

LAYER = Shape(n=28672, k=4096, bits=4, group_size=128)
LOOP = [
    ("LDS.128 R4, [R2]", 4),
    ("LDS.64 R4, [R2]", 2),
    ("LDS.U16 R4, [R2]", 1),
    ("LDSM.16.M88.4 R4, [R2]", 4),
    ("LDSM.16.M88.2 R4, [R2]", 2),
    ("LDSM.16.M88 R4, [R2]", 1),
    ("STS [R2], R4", 1),
    ("LDGSTS.E.BYPASS.LTC256B.128 [R2], [R4]", 4),
    ("LDG.E.128 R4, [R2]", 0),  # no shared memory
    ("HMMA.16816.F32 R8, R4, R6, R8", 0),
]
"""Instructions of a loop, and their wavefronts of shared memory."""


def compiled(arch: str, token_blocks: int) -> Kernel:
    """Return a kernel whose only loop is LOOP, with a product for each block of rows."""
    texts = [text for text, _ in LOOP] + [LOOP[-1][0]] * (token_blocks - 1) + ["@!P0 BRA 0x0"]
    lines = [f"        /*{16 * at:04x}*/   {text} ;   /* 0x1 */" for at, text in enumerate(texts)]
    listing = "\n".join([f"code for {arch}", "Function : f", *lines])
    (kernel,) = parse_code(listing)
    kernel.name = f"qlinear::cuda::linear_alone<qlinear::cuda::F16, 4, {token_blocks}, false>"
    kernel.resources = {"REG": 128}
    return kernel


KERNELS = [
    compiled(arch, blocks) for arch in ("sm_80", "sm_86", "sm_89") for blocks in (1, 2, 4, 8)
]


def lines(bench: dict[str, Any] | None = None) -> dict[tuple[str, int], kernel_gpus.Line]:
    planner = load_planner(default_cache_dir())
    return {
        (chip.gpu, m): kernel_gpus.line(KERNELS, planner, chip, LAYER, m, bench or {})
        for chip in kernel_gpus.CHIPS
        for m in (1, 16, 64)
    }


def test_wavefronts_are_those_of_the_width() -> None:
    code = compiled("sm_80", 1).code
    assert kernel_gpus.wavefronts_of(code) == sum(waves for _, waves in LOOP)


def test_kernels_are_told_apart() -> None:
    others = [compiled("sm_80", 1), compiled("sm_86", 2), compiled("sm_86", 1)]
    others[0].arch, others[0].name = "sm_86", others[0].name.replace("F16, 4", "BF16, 4")
    assert kernel_gpus.kernel_for(others, "sm_86", 1) is others[2]
    with pytest.raises(LookupError, match="no kernel linear_alone<F16, 4, 8, false> of sm_86"):
        kernel_gpus.kernel_for(others, "sm_86", 8)


def test_every_gpu_has_plans_that_fit_and_enough_in_flight() -> None:
    found = lines()
    assert len(found) == 4 * 3
    for (gpu, _), one in found.items():
        assert 0 < one.occupancy <= 1
        assert one.registers * 32 * one.warps <= 65536
        assert one.shared_kib <= (163 if gpu == "A100-80GB" else 99)
        assert one.wanted_kib < one.in_flight_kib < one.shared_kib
        assert 0.2 < one.expected_ratio < 1
    a10 = found["A10", 1]
    # 16 warps, a stage ahead of the one in work: 2 KiB of codes and 64 bytes of scales each, and
    # four groups of warps with 2 KiB of x.
    assert (a10.plan, a10.warps) == ("1 x 4x4", 16)
    assert a10.in_flight_kib == pytest.approx(16 * (2 + 1 / 16) + 4 * 2)
    assert a10.wanted_kib == pytest.approx(600e9 / 72 * 600e-9 / 1024)


def test_shares_are_of_the_floors_time() -> None:
    one = lines()["A10", 1]
    per_256 = len(LOOP) + 1
    floor_seconds = (4096 * 28672 * (0.5 + 2 / 128) + (4096 + 28672) * 2) / 600e9
    clocks = 4096 * 28672 / 256 * per_256 / (72 * 4)
    assert one.per_256 == per_256
    assert one.issue_share == pytest.approx(clocks / 1.695e9 / floor_seconds)
    waves = sum(waves for _, waves in LOOP)
    assert one.shared_share / one.issue_share == pytest.approx(4 * waves / per_256)


def test_rows_beyond_a_tile_go_through_the_weights_again() -> None:
    found = lines()["A10", 64]
    assert found.per_256 == len(LOOP) + 1 + 3, "tiles of 32 rows"
    floor_seconds = 2 * 64 * 4096 * 28672 / 125e12
    clocks = 2 * 4096 * 28672 / 256 * found.per_256 / (72 * 4)
    assert found.issue_share == pytest.approx(clocks / 1.695e9 / floor_seconds)


def test_times_of_another_gpu_are_scaled_by_the_clock() -> None:
    results = {"qlinear as-A10": {"us": 42.1}, "qlinear as-L4": {"us": 4000.0}}
    cell = {"variant": "f16", "k": 4096, "n": 28672, "m": 1, "results": results}
    found = lines({"cells": [cell], "states": [{"clocks.sm": "1980 MHz"}]})
    assert found["A10", 1].scaled_ratio == 1.0, "memory decides"
    assert found["L4", 1].scaled_ratio == pytest.approx(202.07 / (4000 * 1.98 / 2.04), rel=1e-3)
    assert found["RTX4090", 1].scaled_ratio is None
    assert found["A10", 16].scaled_ratio is None


def test_the_program_prints_a_line_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel_gpus, "find_cuobjdump", lambda named: "")
    monkeypatch.setattr(kernel_gpus, "disassembled", lambda tool, file: KERNELS)
    out = tmp_path / "out.json"
    assert kernel_gpus.main(["library.so", "--rows", "1,64", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert [printed.count(f" {chip.gpu} ") for chip in kernel_gpus.CHIPS] == [2] * 4
    assert len(json.loads(out.read_text())["lines"]) == 8
    monkeypatch.setattr(kernel_gpus, "disassembled", lambda tool, file: KERNELS[:4])
    assert kernel_gpus.main(["library.so"]) == 1
    assert "no kernel linear_alone" in capsys.readouterr().err
