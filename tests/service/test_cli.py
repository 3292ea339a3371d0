"""The program itself: early leavers, Ctrl-C, and an install without the server's packages."""

import argparse
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlinear_service import cli

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


def test_ctrl_c_ends_a_waiting_call_without_a_traceback(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 6), np.float32))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = ["call", "a", "--in", str(tmp_path / "x.npy"), "--out", str(tmp_path / "y.npy")]
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "qlinear_service",
                *words,
                "--target",
                target,
                "--timeout",
                "60",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130


@pytest.mark.parametrize("verb", cli.VERBS)
def test_ctrl_c_ends_every_verb_with_130(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: Any) -> int:
        raise KeyboardInterrupt

    command = importlib.import_module(f"qlinear_service.commands.{verb}")
    monkeypatch.setattr(command, "run", interrupted)
    monkeypatch.setattr(command, "add_arguments", lambda parser: None)
    assert cli.main([verb]) == 130


# What a value of a flag may be called: a unit, a thing, or what it looks like.
UNITS = {"SECONDS", "MICROSECONDS", "BYTES", "ROWS", "ROWS,ROWS", "CALLS", "CALLS/S", "CALLERS"}
UNITS |= {"ANSWERS", "BATCHES", "LAYERS", "PROCESSES", "THREADS", "PORT", "RATIO", "N", "N,N", "K"}
THINGS = {"DEVICE", "DIR", "DTYPE,DTYPE", "FILE", "HOST", "HOST:PORT", "LIST", "MODEL", "NAME"}
THINGS |= {"PATH", "SOURCE", "LAYER", "URL", "X.npy", "Y.npy", "WHAT", "..."}


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_calls_values_by_their_units(verb: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"qlinear_service.commands.{verb}").add_arguments(parser)
    called = {
        action.dest: action.metavar or action.dest.upper()
        for action in parser._actions
        if action.nargs != 0 and action.choices is None
    }
    assert called
    for dest, word in called.items():
        assert word in UNITS | THINGS or re.fullmatch(r"\{\w+(,\w+)+\}", str(word)), dest
        if dest.endswith("_seconds") or dest in (
            "timeout",
            "interval",
            "duration",
            "max_queue_age",
        ):
            assert word == "SECONDS", dest


@pytest.mark.parametrize(
    ("words", "missing"), [(["serve", "."], "torch"), (["inspect", "."], "rich")]
)
def test_the_base_install_says_what_is_missing(words: list[str], missing: str) -> None:
    # As if they were not installed; None in sys.modules would raise the same with another text.
    program = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'rich', 'safetensors', 'xxhash'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from qlinear_service.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"qlinear {words[0]}: the package {missing!r} is missing; "
        "install it with: pip install 'qlinear[server]'\n"
    )
