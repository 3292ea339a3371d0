"""The native dispatcher alone, under a random front end and sanitizers."""

import subprocess
from pathlib import Path

import pytest

from qlinear_service.kernels.ninja import SOURCE_ROOT, find_compiler

CALLS = 30_000
STRESS = Path(__file__).parents[1] / "csrc/dispatch_stress.cpp"


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_every_item_gets_one_last_word_and_its_own_result(tmp_path: Path, sanitizer: str) -> None:
    program = tmp_path / "stress"
    sources = [*sorted(SOURCE_ROOT.glob("dispatch/*.cpp")), STRESS]
    # That sanitizer does not see fences; nothing here relies on one to hand over memory.
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-tsan"]
    checks = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    built = subprocess.run(
        [
            *(find_compiler(), "-std=c++17", "-O1", "-g", "-pthread", *warnings, *checks),
            *(f"-I{SOURCE_ROOT}", *map(str, sources), "-o", str(program)),
        ],
        capture_output=True,
        text=True,
    )
    if "cannot find" in built.stderr:
        pytest.skip(f"this compiler has no sanitizer: {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program), str(CALLS)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("taken back") == 6, (
        "none, one and two threads that spin, with and without faults"
    )
