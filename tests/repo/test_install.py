"""Installs for real: without torch or any other extra the client runs, with `server` a server does.

The wheel of an image brings its kernels: no compiler is needed where it runs. For the client the
floor and the newest major of protobuf are both tried; generated code refuses older runtimes.
"""

import os
import platform
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from image_locks import REQUIREMENTS, pins
from serve_process import serve_process
from source_tree import ROOT

PACKED = (
    "pyproject.toml",
    "setup.py",
    "LICENSE",
    "README.md",
    "proto",
    "service",
    "client",
    "csrc",
)

MODEL = ROOT / "examples/models/all-MiniLM-L6-v2"

SCRIPT = """
import importlib.util
import numpy as np
from qlinear.v1 import linear_pb2, linear_pb2_grpc
from qlinear_client._core import prepare_matmul
request = prepare_matmul("a", np.ones((2, 3), np.float32), output_dtype=None, priority=0).request
assert linear_pb2.MatMulRequest.FromString(request.SerializeToString()) == request
assert importlib.util.find_spec("torch") is None
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that building leaves nothing in the work tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in PACKED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, copy / name, symlinks=True)
        elif path.exists():
            shutil.copy(path, copy / name)
    return copy


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("protobuf", ["protobuf==6.31.1", "protobuf>=7,<8"])
def test_base_install_runs_the_client(source: Path, tmp_path: Path, protobuf: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, source, "grpcio==1.78.2", protobuf], check=True)
    subprocess.run([python, "-W", "error", "-c", SCRIPT], check=True, cwd=tmp_path)

    call = [tmp_path / "env/bin/qlinear", "call", "a", "--in", "no.npy", "--out", "y.npy"]
    done = subprocess.run(
        [*call, "--target", "127.0.0.1:1"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (
        1,
        "qlinear call: no.npy: No such file or directory\n",
    )

    serve = [tmp_path / "env/bin/qlinear", "serve", "."]
    done = subprocess.run(serve, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "qlinear serve: the package 'torch' is missing; "
        "install it with: pip install 'qlinear[server]'\n",
    )

    code = "from importlib.resources import files; print(files('qlinear_service') / 'csrc')"
    csrc = Path(subprocess.check_output([python, "-c", code], text=True, cwd=tmp_path).strip())
    for folder in (".", "cpu", "cuda"):
        here = {path.name for path in (ROOT / "csrc" / folder).glob("*.[hc]*")}
        assert here <= {path.name for path in (csrc / folder).iterdir()}


@pytest.fixture
def wheel(source: Path, tmp_path: Path) -> Path:
    """The wheel as the Dockerfile builds it, with the CPU kernels inside."""
    package = tmp_path / "package"
    ignore = shutil.ignore_patterns("prebuilt", "__pycache__")
    shutil.copytree(source, package, symlinks=True, ignore=ignore)
    build = [sys.executable, "-m", "qlinear_service.kernels.build", "--cpu"]
    folders = [str(package / name) for name in ("service", "client", "proto")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    subprocess.run(build, check=True, cwd=package, env=environment)
    assert list(package.glob("service/qlinear_service/prebuilt/libqlinear_cpu-*.so"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*command, tmp_path / "wheels", package], check=True)
    (built,) = (tmp_path / "wheels").iterdir()
    return built


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_serves_where_no_compiler_is(wheel: Path, tmp_path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert wheel.name == f"qlinear-{version}-py3-none-linux_{platform.machine()}.whl"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    torch = f"torch=={pins('cpu-torch')['torch'].partition('+')[0]}"
    subprocess.run([*install, torch], check=True)  # alone: a small CPU build where one is offered
    lock = ["--no-deps", "--require-hashes", "-r", REQUIREMENTS / "cpu.txt"]
    subprocess.run([*install, *lock], check=True)
    subprocess.run([*install, "--no-deps", "--no-index", wheel], check=True)

    # Nothing but this environment: no compiler, no shell, no kernels that were built earlier.
    program = str(tmp_path / "env/bin/qlinear")
    clean = {"PATH": str(tmp_path / "env/bin"), "HOME": str(tmp_path / "home")}
    assert shutil.which("g++", path=clean["PATH"]) is None

    def run(*words: str | Path) -> str:
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, env=clean, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = run("doctor", "--device", "cpu").splitlines()
    assert said[-1] == f"qlinear {version} can serve on cpu"
    (kernels,) = [line for line in said if line.split()[1:3] == ["cpu", "kernels"]]
    assert kernels.startswith("ok "), kernels
    assert " CPU kernels, " in kernels  # and not plain torch
    with serve_process(MODEL, program=[program], environment=clean) as address:
        assert run("doctor", "--health", "--target", address) == f"{address}: SERVING\n"
        run("load", "--target", address, "--duration", "1", "--check", MODEL, "--fail-on-error")
