"""Runs `qlinear doctor` in the process of a test and reads its report."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from qlinear_service import cli

Doctor = Callable[..., tuple[int, dict[str, Any]]]


def runner(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Return what runs the verb with --json and returns the exit code and what was printed."""

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        code = cli.main(["doctor", "--json", *words])
        return code, json.loads(capsys.readouterr().out)

    return run


def states(report: dict[str, Any]) -> dict[str, str]:
    """The state of each finding."""
    return {name: finding["state"] for name, finding in report["findings"].items()}


def text(report: dict[str, Any], name: str) -> str:
    """The sentence of one finding."""
    return str(report["findings"][name]["text"])
