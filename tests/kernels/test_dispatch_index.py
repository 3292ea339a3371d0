"""The dispatcher's table of entries, beside a map."""

import subprocess
from pathlib import Path

from qlinear_service.kernels.ninja import SOURCE_ROOT, find_compiler

PROGRAM = Path(__file__).parents[1] / "csrc/index_test.cpp"


def test_it_finds_what_a_map_finds(tmp_path: Path) -> None:
    built = tmp_path / "index"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
    words = [find_compiler(), *flags, f"-I{SOURCE_ROOT}", str(PROGRAM), "-o", str(built)]
    subprocess.run(words, check=True)
    done = subprocess.run([str(built)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
