"""The image for real: built, run locked down, called, probed, stopped; the GPU's on the CPU."""

import json
import subprocess
import time
from collections.abc import Iterator

import image_tools
import pytest
from image_locks import REQUIREMENTS, normal, pins
from image_tools import MODELS, VERSION, answers_are_right, free_port, locked_down

from qlinear_client import Client
from qlinear_service.kernels.architectures import ARCHITECTURES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

START_SECONDS = 120


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def target(request: pytest.FixtureRequest) -> str:
    """A stage of the Dockerfile that is to be run."""
    return str(request.param)


@pytest.fixture(scope="module")
def image(engine: str, target: str) -> str:
    return image_tools.build(engine, target)


@pytest.fixture(scope="module")
def served(engine: str, image: str) -> Iterator[tuple[str, str]]:
    """A container that serves the sample model, read-only; its id and its address."""
    port = free_port()
    words = [engine, "run", "--detach", *locked_down(MODELS)]
    words += ["--env", f"QLINEAR_PORT={port}", "--env", "QLINEAR_METRICS_PORT=-1", image]
    container = subprocess.check_output(words, text=True).split()[-1]
    try:
        yield container, f"127.0.0.1:{port}"
    finally:
        subprocess.run([engine, "rm", "--force", container], capture_output=True, check=True)


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


def _probe(name: str, container: str) -> list[str]:
    (found,) = json.loads(subprocess.check_output([name, "inspect", container]))
    test = found["Config"]["Healthcheck"]["Test"]
    assert test[0] == "CMD"
    return list(test[1:])


def test_it_serves_as_nobody_from_a_read_only_root_and_ends_when_told(
    engine: str, served: tuple[str, str]
) -> None:
    container, address = served
    _until_ready(engine, container)
    with Client(address) as client:
        assert client.server_info().version == VERSION
    answers_are_right(address)
    assert _inside(engine, container, "id", "-u").stdout == "10001\n"
    refused = _inside(engine, container, "touch", "/opt/qlinear/new")
    assert "Read-only file system" in refused.stderr
    said = subprocess.run([engine, "logs", container], capture_output=True, text=True)
    assert " event=kernels name=cpu " in said.stderr + said.stdout  # not plain torch

    subprocess.run([engine, "stop", "--time", "40", container], check=True, capture_output=True)
    (found,) = json.loads(subprocess.check_output([engine, "inspect", container]))
    assert found["State"]["ExitCode"] == 0


def _shell(engine: str, image: str, script: str) -> str:
    run = [engine, "run", "--rm", "--network", "none", "--entrypoint", "/bin/sh", image, "-c"]
    return subprocess.run([*run, script], capture_output=True, text=True, check=True).stdout


def test_it_has_no_compiler_and_says_what_it_is(engine: str, image: str) -> None:
    script = "command -v gcc g++ cc nvcc pip; qlinear --version"
    assert _shell(engine, image, script) == f"qlinear {VERSION}\n"

    (found,) = json.loads(subprocess.check_output([engine, "image", "inspect", image]))
    labels = found["Config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == VERSION
    assert found["Config"]["User"] == "10001:10001"


def test_it_has_what_is_locked_and_nothing_else_and_lists_it(
    engine: str, image: str, target: str
) -> None:
    bill = json.loads(_shell(engine, image, "cat /opt/qlinear/sbom.cdx.json"))
    has = {normal(one["name"]): one["version"] for one in bill["components"]}
    assert has.pop("qlinear") == VERSION
    locked = pins("gpu") if target == "gpu" else pins("cpu") | pins("cpu-torch")
    if target == "gpu":  # before Python 3.12 torch asks for none, and venv's own stays
        assert locked.pop("setuptools")
        assert has.pop("setuptools")
    assert has == locked
    listed = _shell(engine, image, "cat /opt/qlinear/licences.md")
    assert listed == (REQUIREMENTS / "licences.md").read_text()


def test_a_gpu_image_holds_kernels_for_every_architecture(
    engine: str, image: str, target: str
) -> None:
    told = _shell(engine, image, "qlinear doctor")
    built = f"gpu kernels    prebuilt for {' '.join(ARCHITECTURES)} with nvcc"
    assert (built in told) == (target == "gpu"), told
