"""Damaged checkpoints of every format: a correct load or a clean error, in bounded memory and time.

The programs are tests/fuzz_checkpoints.py and tests/fuzz_bytes.py; a crash shows in the exit code.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import fuzz_checkpoints
import pytest
from source_tree import ROOT


def run(program: str, *words: str, folder: Path, seconds: float) -> str:
    """What the program prints; its failure is the test's."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / program), *words],
        cwd=folder, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def counts(printed: str) -> tuple[int, int]:
    """How many damaged checkpoints were loaded and refused."""
    match = re.search(r"loaded (\d+), refused (\d+)", printed)
    assert match is not None, printed
    return int(match.group(1)), int(match.group(2))


def test_some_hundred_damaged_checkpoints(tmp_path: Path) -> None:
    printed = run("fuzz_checkpoints.py", "--examples", "400", folder=tmp_path, seconds=100)
    loaded, refused = counts(printed)
    assert loaded > 20  # damage that does no harm, or that no format can see
    assert refused > 150


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_many_thousand_damaged_checkpoints(tmp_path: Path) -> None:
    words = ("--examples", "3000", "--seconds", "120")
    assert sum(counts(run("fuzz_checkpoints.py", *words, folder=tmp_path, seconds=380))) > 4000


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed (make lint does)"
)
def test_damaged_bytes_that_seek_out_branches(tmp_path: Path) -> None:
    printed = run("fuzz_bytes.py", "-max_total_time=60", folder=tmp_path, seconds=280)
    match = re.search(r"Done (\d+) runs", printed)
    assert match is not None, printed[-2000:]
    assert int(match.group(1)) > 2000


def test_the_fuzzer_sees_an_error_that_is_not_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would notice a reader that lets another exception through."""

    def careless(folder: Path, treatment: str) -> None:
        raise KeyError("qweight")

    monkeypatch.setattr(fuzz_checkpoints, "packed_layers", careless)
    with pytest.raises(KeyError):
        fuzz_checkpoints.load(tmp_path, fuzz_checkpoints.seed(fuzz_checkpoints.SEEDS[0]), "auto")


def test_memory_is_bounded_in_the_fuzzer(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import fuzz_checkpoints, torch\n"
        "fuzz_checkpoints.bound_memory()\n"
        "torch.zeros(fuzz_checkpoints.MOST_BYTES)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT / "tests")], capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "allocate memory" in done.stderr or "not enough memory" in done.stderr
