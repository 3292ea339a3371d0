"""Builds the image of the CPU target and runs commands in it, where a container engine is.

IMAGE_BASE replaces all three bases of the Dockerfile, for machines without a registry; IMAGE_FLAGS
are more words for the build: what its network needs, such as certificates. ENGINE names the engine.
"""

import os
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from source_tree import ROOT

VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGE = "localhost/qlinear-test:cpu"
BASES = ("CUDA_BUILDER", "CPU_BUILDER", "RUNTIME")


def engine() -> str:
    """Return docker or podman; without one that works, or a base, skip and say why."""
    if not os.environ.get("IMAGE_BASE"):
        pytest.skip("make image-test BASE=image builds and runs an image; nobody has named a base")
    names = [os.environ["ENGINE"]] if os.environ.get("ENGINE") else ["docker", "podman"]
    found = [name for name in names if shutil.which(name) and _works(name)]
    if not found:
        pytest.skip(f"none of {', '.join(names)} runs here: apt-get install podman buildah runc")
    return found[0]


def build(name: str) -> str:
    """Build the CPU target with an engine; the image's name."""
    words = [name, "build", "--target", "cpu", "-t", IMAGE, "--build-arg", f"VERSION={VERSION}"]
    for base in BASES:
        words += ["--build-arg", f"{base}={os.environ['IMAGE_BASE']}"]
    more = shlex.split(os.environ.get("IMAGE_FLAGS", ""))
    done = subprocess.run([*words, *more, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return IMAGE


def locked_down(model: Path) -> list[str]:
    """Return the flags that do what deploy/compose.yaml does, but for the network."""
    flags = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--network", "host"]
    return [*flags, "--security-opt", "no-new-privileges", "-v", f"{model}:/models:ro"]


def _works(name: str) -> bool:
    return subprocess.run([name, "info"], capture_output=True).returncode == 0
