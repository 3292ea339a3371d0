"""The Makefile hands its arguments on as they are."""

import os
import subprocess
import tomllib

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


def test_types_are_checked_of_all_python_but_tests_and_what_is_generated() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    # setup.py has nothing that could be checked: setuptools is untyped.
    folders = {path.split("/")[0] for path in listed.stdout.split()} - {"setup.py"}
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert set(checked) == folders - {"tests", "proto"}
