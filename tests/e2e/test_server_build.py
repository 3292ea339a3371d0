"""A server that is told to end while it compiles its kernels leaves no compiler and no file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packed_files import layers_of_every_kind, write_layers

WAIT_SECONDS = 60


def processes_of(folder: Path) -> list[bytes]:
    """Command lines that name the folder, or whose process works in it; the server's excepted."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            inside = (process / "cwd").readlink().is_relative_to(folder)
        except OSError:
            continue
        if inside or (os.fsencode(folder) in words and b"qlinear_service" not in words):
            found.append(words)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_build_ends_it(number: signal.Signals, tmp_path: Path) -> None:
    model = write_layers(tmp_path / "model.safetensors", layers_of_every_kind()[:1])
    cache = tmp_path / "cache"
    words = ["serve", str(model), "--port", "0", "--metrics-port", "-1", "--cache-dir", str(cache)]
    process = subprocess.Popen(
        [sys.executable, "-m", "qlinear_service", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    gives_up = time.monotonic() + WAIT_SECONDS
    while not any(b"cc1plus" in words for words in processes_of(cache)):
        assert process.poll() is None
        assert time.monotonic() < gives_up, "no compiler was started"
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert "event=stopped engine_ended=true" in err
    assert not processes_of(cache)
    assert not list((cache / "kernels").iterdir())
