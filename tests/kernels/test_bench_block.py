"""What the benchmarks of a block share, over stand-ins; and that none begins without a GPU."""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import ablation
import block_bench
import chain
import kernel
import kernel_mix
import kernel_tune
import needs_gpu
import torch
from block_bench import BlockBench, Found
from rich.console import Console

from qlinear_service.errors import BuildError
from qlinear_service.kernels.driver import Driver, Gpu

NO_GPU = Driver()
ONE_GPU = Driver(gpus=(Gpu(ordinal=0, name="Made up", major=9, minor=0, memory_bytes=1 << 30),))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, a library and facts of theirs that are made up."""
    monkeypatch.setattr(block_bench, "gpu_missing", lambda prog: False)
    monkeypatch.setattr(block_bench, "library_of", contextlib.nullcontext)
    monkeypatch.setattr(block_bench, "Gpu", lambda: SimpleNamespace(spin_up=lambda: None))
    monkeypatch.setattr(block_bench, "Library", lambda path, gpu: path)
    monkeypatch.setattr(block_bench, "gpu_state", lambda: {"clock": "1 MHz"})


def bench(**changed: Any) -> BlockBench:
    def measure(gpu: Any, library: Any, rows: Sequence[int], replays: int) -> Found:
        return {"library": str(library), "rows": rows, "replays": replays}

    def show(out: Console, found: Found) -> None:
        out.print(f"rows {found['rows']}")

    made: dict[str, Any] = {"measure": measure, "show": show, "is_right": lambda found: True}
    return BlockBench(
        prog="qlinear bench x", description="Says so.", rows=(1, 8), replays=3, **made | changed
    )


def test_figures_stand_beside_their_facts(
    pretended: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = tmp_path / "figures.json"
    words = ["--commit", "abc", "--library", "a.so", "--json", str(told), "--rows", "4,2"]
    assert block_bench.run(bench(), words) == 0
    assert capsys.readouterr().out == "rows [4, 2]\n"
    found = json.loads(told.read_text())
    facts = found.pop("machine")
    assert found == {"library": "a.so", "rows": [4, 2], "replays": 3}
    kept = facts["commit"], facts["before clock"], facts["after clock"]
    assert kept == ("abc", "1 MHz", "1 MHz")


def test_a_wrong_result_and_a_library_that_is_not_there_are_1(
    pretended: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert block_bench.run(bench(is_right=lambda found: False), ["--commit", "abc"]) == 1
    assert capsys.readouterr().out == "rows [1, 8]\n"

    def nowhere(named: Path | None) -> None:
        raise BuildError("there is no such file")

    monkeypatch.setattr(block_bench, "library_of", nowhere)
    assert block_bench.run(bench(), []) == 1
    assert capsys.readouterr() == ("", "qlinear bench x: there is no such file\n")


@pytest.mark.parametrize("rows", ["x", "0", "1,-1", "", "1,x"])
def test_rows_that_are_none_are_one_sentence(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        block_bench.run(bench(), [f"--rows={rows}"])
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"qlinear bench x: error: {rows!r} is no list of positive row counts"


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (ablation.main, ["--run", "nowhere"]),
        (chain.main, []),
        (kernel.main, []),
        (kernel_mix.main, []),
        (kernel_tune.main, []),
    ],
    ids=["ablation", "chain", "kernel", "mix", "tune"],
)
@pytest.mark.parametrize(
    ("driver", "cuda", "why"),
    [
        (NO_GPU, "13.0", "the driver shows none"),
        (Driver(problem="there is no driver"), "13.0", "there is no driver"),
        (ONE_GPU, None, f"torch {torch.__version__} cannot use one; it is no build for CUDA"),
    ],
    ids=["no GPU", "no driver", "torch of the CPU"],
)
def test_without_a_gpu_that_can_be_used_it_says_so(
    main: Callable[[list[str]], int],
    words: list[str],
    driver: Driver,
    cuda: str | None,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(needs_gpu, "ask_driver", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert main(words) == 2
    out, said = capsys.readouterr()
    assert (out, said.count("\n")) == ("", 1)
    assert said.startswith("qlinear bench ")
    assert said.endswith(f": needs a CUDA GPU; {why}\n")


def test_an_ablation_names_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        ablation.main(["--build", str(tmp_path), "--only", "magic"])
    assert "error: 'magic' is no technique; there are: nothing taken out; " in (
        capsys.readouterr().err
    )
    monkeypatch.setattr(ablation, "gpu_missing", lambda prog: False)
    assert ablation.main(["--run", str(tmp_path)]) == 2
    said = f"qlinear bench ablation: {tmp_path}/nothing taken out.so is not there; see --build\n"
    assert capsys.readouterr() == ("", said)
