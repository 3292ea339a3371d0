"""The kernel benchmark's processes: one that measures and may die, and one that watches it."""

# ruff: noqa: E402
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import kernel_journal as journals

from qlinear_service.kernels.driver import ask_driver

needs_no_gpu = pytest.mark.skipif(not ask_driver().problem, reason="there is a GPU")

WORKER = """
import os, sys, time
sys.path.append(sys.argv[1])
from kernel_journal import Journal
from pathlib import Path
journal = Journal(Path(sys.argv[2]))
for key, deed in [word.split("=") for word in sys.argv[3:]]:
    if key in journal.done() or key in journal.failures():
        continue
    journal.begin(key, seconds=1.0)
    if deed == "die":
        os.abort()
    if deed == "hang":
        time.sleep(60)
    if deed == "lost":
        journal.fail(key, "illegal address")
        os._exit(70)
    if deed == "half":
        with open(sys.argv[2], "a") as file:
            file.write('{"kind": "job"')
        os._exit(1)
    journal.add("job", key=key)
"""


def watched(folder: Path, *deeds: str, deadline: float = 1e12, restarts: int = 8) -> int:
    """Run a process that does these deeds, and the watcher over it."""
    script, path = folder / "worker.py", folder / "journal"
    script.write_text(WORKER)
    command = [sys.executable, "-S", str(script), str(BENCHMARKS), str(path), *deeds]
    return journals.supervise(command, path, deadline=deadline, most_restarts=restarts)


def test_a_run_without_trouble_is_one_process(tmp_path: Path) -> None:
    assert watched(tmp_path, "a=do", "b=do") == 0
    journal = journals.Journal(tmp_path / "journal")
    assert (journal.done(), journal.failures()) == ({"a", "b"}, {})


def test_what_dies_or_hangs_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    assert watched(tmp_path, "a=die", "b=do", "c=hang", "d=half", "e=lost", "f=do") == 0
    journal = journals.Journal(tmp_path / "journal")
    assert journal.done() == {"b", "f"}
    assert journal.failures() == {
        "a": "the process died of signal 6",
        "c": "no end within 1 s: killed",
        "d": "the process ended with exit code 1",
        "e": "illegal address",
    }


def test_what_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    assert watched(tmp_path, "a=die", "b=die", "c=die", restarts=1) == -6
    assert journals.Journal(tmp_path / "journal").failures().keys() == {"a", "b"}
    missing = [sys.executable, str(tmp_path / "nowhere.py")]
    assert journals.supervise(missing, tmp_path / "other", deadline=1e12) == 2


def test_a_process_that_is_stuck_behind_the_deadline_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "STEP_SECONDS", 0.1)
    started = time.monotonic()
    assert watched(tmp_path, "a=hang", "b=do", deadline=0.0) == journals.KILLED
    assert time.monotonic() - started < 20


def test_errors_are_one_line() -> None:
    assert journals.one_line(ValueError("a\n  b")) == "a b"
    assert journals.one_line(ValueError()) == "ValueError"
    assert len(journals.one_line(ValueError("x" * 1000))) == 300


@needs_no_gpu
@pytest.mark.parametrize("words", [[], ["--quick", "--sweep"]])
def test_without_a_gpu_it_says_so_and_exits_2(words: list[str]) -> None:
    command = [sys.executable, "-m", "qlinear_service", "bench", "kernel", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("qlinear bench kernel: needs a CUDA GPU; ")
    assert len(done.stderr.splitlines()) == 1


def test_help_tells_method_and_exit_codes() -> None:
    command = [sys.executable, "-m", "qlinear_service", "bench", "kernel", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for word in ("--budget-seconds", "distinct copies", "exit code", "examples", "--sweep"):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


def test_the_reference_floor_says_where_it_comes_from() -> None:
    data = json.loads((BENCHMARKS / "data/h200_read_floor.json").read_text())
    assert {"what", "measured", "gpu", "method"} <= data.keys()
