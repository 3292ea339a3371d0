"""The Makefile hands its arguments on as they are."""

import subprocess

from source_tree import ROOT


def test_a_model_with_a_blank_in_its_path_is_one_word() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "run", "MODEL=my model"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == '.venv/bin/qlinear serve "my model"'
