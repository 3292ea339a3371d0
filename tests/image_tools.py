"""Builds the image and runs commands in it, where a container engine is.

IMAGE_BASE replaces all three bases of the Dockerfile, for machines without a registry;
IMAGE_CUDA_BASE, the same with CUDA's compiler, lets the GPU target be built, too; IMAGE_FLAGS are
more words for the build: what its network needs, such as certificates. ENGINE names the engine.
"""

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from source_tree import ROOT

VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MODELS = ROOT / "examples/models"
IMAGE = "localhost/qlinear-test"
BASES = ("CUDA_BUILDER", "CPU_BUILDER", "RUNTIME")


def engine() -> str:
    """Return docker or podman; without one that works, or a base, skip and say why."""
    if not os.environ.get("IMAGE_BASE"):
        _skip("make image-test BASE=image builds and runs an image; nobody has named a base")
    names = [os.environ["ENGINE"]] if os.environ.get("ENGINE") else ["docker", "podman"]
    found = [name for name in names if shutil.which(name) and _works(name)]
    if not found:
        _skip(f"none of {', '.join(names)} runs here: apt-get install podman buildah runc")
    return found[0]


def build(name: str, target: str = "cpu") -> str:
    """Build a target with an engine; the image's name. The GPU's needs a base that has nvcc."""
    image, bases = f"{IMAGE}:{target}", dict.fromkeys(BASES, os.environ["IMAGE_BASE"])
    if target == "gpu":
        cuda = os.environ.get("IMAGE_CUDA_BASE")
        if not cuda:
            pytest.skip("IMAGE_CUDA_BASE names no base with CUDA's compiler")
        bases["CUDA_BUILDER"] = cuda
    words = [name, "build", "--target", target, "-t", image, "--build-arg", f"VERSION={VERSION}"]
    words += ["--build-arg", "REVISION=test"]
    for argument, base in bases.items():
        words += ["--build-arg", f"{argument}={base}"]
    _built([*words, *build_flags(), str(ROOT)])
    return image


def build_prometheus(name: str, folder: Path) -> str:
    """Build Debian's Prometheus as the usual image of it is: nobody's, with a folder for data."""
    (folder / "Dockerfile").write_text(
        f"FROM {os.environ['IMAGE_BASE']}\n"
        "RUN apt-get update && apt-get install -y --no-install-recommends prometheus \\\n"
        "    && install -d -o nobody /prometheus\n"
        'USER nobody\nENTRYPOINT ["prometheus"]\n'
    )
    image = "localhost/qlinear-test:prometheus"
    _built([name, "build", "-t", image, *build_flags(), str(folder)])
    return image


def build_flags() -> list[str]:
    """Return the further words of a build."""
    return shlex.split(os.environ.get("IMAGE_FLAGS", ""))


def locked_down(model: Path) -> list[str]:
    """Return the flags that do what deploy/compose.yaml does, but for the network."""
    flags = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--network", "host"]
    return [*flags, "--security-opt", "no-new-privileges", "-v", f"{model}:/models:ro"]


def answers_are_right(address: str) -> None:
    """Compare answers with the exact ones from the files; none may fail."""
    command = [sys.executable, "-m", "qlinear_service", "load", "--target", address]
    command += ["--rows", "1,16", "--duration", "2", "--check", str(MODELS), "--fail-on-error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _built(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def _skip(why: str) -> None:
    if os.environ.get("CI_REQUIRE_IMAGE") == "1":
        pytest.fail(f"CI must not skip this: {why}", pytrace=False)
    pytest.skip(why)


def _works(name: str) -> bool:
    return subprocess.run([name, "info"], capture_output=True).returncode == 0
