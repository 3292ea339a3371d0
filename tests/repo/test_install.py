"""The base install, for real: an environment without torch or any other extra runs the client.

The floor and the newest major of protobuf are both tried; generated code refuses older runtimes.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT

PACKED = ("pyproject.toml", "LICENSE", "README.md", "proto", "service", "client", "csrc")

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
