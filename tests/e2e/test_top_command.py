"""`qlinear top` against a real server: for machines, and in a terminal of 80 columns."""

import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from fcntl import ioctl
from termios import TIOCSWINSZ

import numpy as np
import pytest
from real_prometheus import LAYER, WAIT_SECONDS, K, served_model
from rich.text import Text

from qlinear_client import Client

WIDE_LAYER, WIDE_SHAPE = "encoder.layer.0.output.dense", "k1536_n384_b4_g128"
COMMAND = (sys.executable, "-m", "qlinear_service", "top", "--url")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    with served_model() as found:
        yield found


def call(target: str, times: int) -> None:
    with Client(target) as client:
        for _ in range(times):
            client.matmul(LAYER, np.ones((4, K), np.float16))


def test_machines_read_what_clients_did(addresses: tuple[str, str]) -> None:
    target, metrics = addresses
    call(target, 20)
    done = subprocess.run(
        [*COMMAND, metrics, "--once", "--json"],
        capture_output=True, text=True, check=True, timeout=WAIT_SECONDS,
    )  # fmt: skip
    assert done.stderr == ""
    document = json.loads(done.stdout)
    shape = document["shapes"][0]
    window = document["window_seconds"]
    assert shape["calls_per_second"] * window == pytest.approx(20, abs=0.01)
    assert shape["batch_rows"] == pytest.approx(4)
    assert 0 < shape["p50_seconds"] <= shape["p99_seconds"]
    assert shape["bytes_per_second"] > 0
    assert 0 < shape["roofline_ratio"] < 2
    assert document["answers"]["healthy"]["headline"] == "Yes"
    (row,) = [layer for layer in document["layers"] if layer["calls_per_second"]]
    assert row["name"].endswith(LAYER)
    times = {part["name"]: part["seconds"] for part in document["time"]["parts"]}
    assert sum(times.values()) == pytest.approx(document["time"]["mean_seconds"], rel=0.2)


def test_a_terminal_of_80_columns_follows_the_traffic(addresses: tuple[str, str]) -> None:
    target, metrics = addresses
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"} | {"COLUMNS": "80", "LINES": "40"}
    process = subprocess.Popen(
        # Whatever runs tests in the background has them ignore the signal that ends this.
        ["env", "--default-signal=INT", *COMMAND, metrics, "--interval", "0.3"],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
    )  # fmt: skip
    os.close(theirs)
    try:
        first = read_until(ours, f"{WIDE_SHAPE} +0 .*[Ll]ayer")
        with Client(target) as client:
            client.matmul(WIDE_LAYER, np.ones((4, 1536), np.float16))
        called = rf"{WIDE_SHAPE} +[0-9.]+ +[0-9.]+ .s .*{WIDE_LAYER[-20:]} +0\."
        shown = shown_by(read_until(ours, called, first))
    finally:
        process.send_signal(signal.SIGINT)
        drain(ours, process)
        os.close(ours)
    assert process.returncode == 130
    assert "qlinear serving" in shown
    assert "● Yes" in shown
    assert max(map(len, shown.splitlines())) <= 80


def drain(terminal: int, process: subprocess.Popen[bytes]) -> None:
    """Read until the process has ended; a terminal that is full would hold it up."""
    end = time.monotonic() + WAIT_SECONDS
    while process.poll() is None and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                os.read(terminal, 65536)
            except OSError:
                break
    process.wait(WAIT_SECONDS)


def read_until(terminal: int, pattern: str, text: bytes = b"") -> bytes:
    """Return `text` and all that was written since, once a pattern is in it."""
    end = time.monotonic() + WAIT_SECONDS
    while not re.search(pattern, shown_by(text), re.DOTALL):
        assert time.monotonic() < end, shown_by(text)
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 65536)
    return text


def shown_by(text: bytes) -> str:
    """Return what a person sees, each screen below the one before; whole lines only."""
    plain = text[: text.rfind(b"\n") + 1].decode().replace("\r\n", "\n").replace("\x1b[H", "\n")
    return Text.from_ansi(plain).plain


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    done = subprocess.run(
        [*COMMAND, "127.0.0.1:1", "--once"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("qlinear top: no server answers at http://127.0.0.1:1: ")
    assert done.stderr.count("\n") == 1
