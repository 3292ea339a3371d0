"""What `qlinear bench tune` is asked to do: shapes of models, flags, and no GPU to do it on."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import tune_options

from qlinear_service.kernels.driver import ask_driver


def test_the_shapes_of_a_model_are_tuned_once_each() -> None:
    model = Path(__file__).parents[2] / "examples/models/all-MiniLM-L6-v2"
    options = tune_options.parse(["--model", str(model), "--rows", "1,16"])
    cells = [(cell.shape.k, cell.shape.n, cell.m) for cell in options.cells]
    assert set(cells) == {(k, n, m) for k, n in ((384, 1536), (1536, 384), (384, 384))
                          for m in (1, 16)}  # fmt: skip
    assert len(cells) == 6
    # The largest first: buffers grow once.
    assert cells[-1] == (384, 384, 16)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--rows", "5"], "--rows has 5; expected some of 1,8,16,"),
        (["--replays", "2"], "--replays is 2; expected 5 at least"),
        (["--budget-seconds", "nan"], "--budget-seconds is nan; expected more than 0"),
        (["--shapes", "x"], "'x' is no shape"),
        (["--model", "x", "--variants", "bf16"], "--variants is for --shapes"),
    ],
)
def test_flags_that_cannot_be_are_one_sentence(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tune_options.parse(words)
    assert f"qlinear bench tune: error: {text}" in capsys.readouterr().err


@pytest.mark.skipif(not ask_driver().problem, reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "qlinear_service", "bench", "tune"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("qlinear bench tune: needs a CUDA GPU; ")
