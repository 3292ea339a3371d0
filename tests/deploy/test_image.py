"""The image of the CPU target for real: built, run locked down, called, probed, stopped."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from image_tools import VERSION, build, engine, locked_down
from source_tree import ROOT

from qlinear_client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = ROOT / "examples/models"
START_SECONDS = 120


@pytest.fixture(scope="module")
def name() -> str:
    return engine()


@pytest.fixture(scope="module")
def image(name: str) -> str:
    return build(name)


@pytest.fixture(scope="module")
def served(name: str, image: str) -> Iterator[tuple[str, str]]:
    """A container that serves the sample model, read-only; its id and its address."""
    port = _free_port()
    words = [name, "run", "--detach", *locked_down(MODEL)]
    words += ["--env", f"QLINEAR_PORT={port}", "--env", "QLINEAR_METRICS_PORT=-1", image]
    container = subprocess.check_output(words, text=True).split()[-1]
    try:
        yield container, f"127.0.0.1:{port}"
    finally:
        subprocess.run([name, "rm", "--force", container], capture_output=True, check=True)


def _free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        return int(free.getsockname()[1])


def _inside(name: str, container: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([name, "exec", container, *words], capture_output=True, text=True)


def _until_ready(name: str, container: str) -> None:
    """Wait as an orchestrator does: until the probe of the HEALTHCHECK says yes."""
    end = time.monotonic() + START_SECONDS
    while (asked := _inside(name, container, *_probe(name, container))).returncode:
        logs = subprocess.run([name, "logs", container], capture_output=True, text=True)
        assert time.monotonic() < end, asked.stderr + logs.stdout + logs.stderr
        time.sleep(0.5)
    assert asked.stdout.endswith(": SERVING\n")


def _answers_are_right(address: str) -> None:
    """Compare answers with the exact ones from the files; none may fail."""
    command = [
        sys.executable,
        "-m",
        "qlinear_service",
        "load",
        "--target",
        address,
        "--rows",
        "1,16",
    ]
    command += ["--duration", "2", "--check", str(MODEL), "--fail-on-error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def _probe(name: str, container: str) -> list[str]:
    (found,) = json.loads(subprocess.check_output([name, "inspect", container]))
    test = found["Config"]["Healthcheck"]["Test"]
    assert test[0] == "CMD"
    return list(test[1:])


def test_it_serves_as_nobody_from_a_read_only_root_and_ends_when_told(
    name: str, served: tuple[str, str]
) -> None:
    container, address = served
    _until_ready(name, container)
    with Client(address) as client:
        assert client.server_info().version == VERSION
    _answers_are_right(address)
    assert _inside(name, container, "id", "-u").stdout == "10001\n"
    refused = _inside(name, container, "touch", "/opt/qlinear/new")
    assert "Read-only file system" in refused.stderr
    said = subprocess.run([name, "logs", container], capture_output=True, text=True)
    assert " event=kernels name=cpu " in said.stderr + said.stdout  # not plain torch

    subprocess.run([name, "stop", "--time", "40", container], check=True, capture_output=True)
    (found,) = json.loads(subprocess.check_output([name, "inspect", container]))
    assert found["State"]["ExitCode"] == 0


def test_it_has_no_compiler_and_says_what_it_is(name: str, image: str) -> None:
    script = "command -v gcc g++ cc nvcc; test -s /opt/qlinear/sbom.cdx.json && qlinear --version"
    run = [name, "run", "--rm", "--network", "none", "--entrypoint", "/bin/sh", image, "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout == f"qlinear {VERSION}\n"

    (found,) = json.loads(subprocess.check_output([name, "image", "inspect", image]))
    labels = found["Config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == VERSION
    assert found["Config"]["User"] == "10001:10001"
