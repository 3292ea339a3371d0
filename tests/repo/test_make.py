"""The Makefile hands its arguments on as they are."""

import os
import subprocess

from source_tree import ROOT


def test_a_model_with_a_blank_in_its_path_is_one_word() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "run", "MODEL=my model"],
        cwd=ROOT,
        # Under `make test` the outer make's flags would be this one's too.
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == '.venv/bin/qlinear serve "my model"'
