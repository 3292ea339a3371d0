"""The program itself: a reader of its output that leaves early."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples/models"


@pytest.mark.parametrize(
    "words",
    [["--help"], ["inspect", str(EXAMPLES)], ["inspect", str(EXAMPLES), "--json"], ["load", "-h"]],
    ids=["usage", "tables", "json", "argparse"],
)
def test_a_reader_that_leaves_is_no_error_worth_words(words: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "qlinear_service", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Unbuffered, argparse meets the closed pipe itself and says nothing: also fine, exit 0.
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    assert process.stdout is not None
    process.stdout.close()  # as `head` does, before the first line is written
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 1
