"""What the README and the examples promise, run as written, on the real model."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qlinear_client import Client

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "models" / "all-MiniLM-L6-v2"


@contextmanager
def serving(path: Path) -> Iterator[str]:
    """Serve `path` on a free port and yield the address."""
    command = [sys.executable, "-m", "qlinear_service", "serve", str(path)]
    with subprocess.Popen(
        [*command, "--port", "0", "--metrics-port", "0", "--drain-delay-seconds", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            yield next(line for line in server.stdout if "ready on " in line).split()[-1]
        finally:
            server.terminate()
        assert server.wait(timeout=30) == 0


def run_demo(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "sentence_embeddings.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_the_demo_is_all_right() -> None:
    done = run_demo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
    assert "24 sentences, 864 layer answers" in done.stdout


def one_row_wrong(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.layer.3.attention.self.query.scales"][:, 100] *= -1


def key_bias_missing(tensors: dict[str, torch.Tensor]) -> None:
    """Softmax cancels it: embeddings stay right, only the layer's own answer shows it."""
    tensors["encoder.layer.2.attention.self.key.bias"].zero_()


@pytest.mark.parametrize("tamper", [one_row_wrong, key_bias_missing])
def test_the_demo_sees_a_wrong_model(
    tmp_path: Path, tamper: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    wrong = tmp_path / MODEL.name
    shutil.copytree(MODEL, wrong)
    tensors = load_file(wrong / "model.safetensors")
    tamper(tensors)
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    with serving(wrong) as target:
        done = run_demo("--target", target)
    assert done.returncode == 1
    assert "WRONG" in done.stdout


def test_the_client_calls_of_the_readme() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    with serving(ROOT / "examples" / "models") as target:
        for block in blocks:
            names: dict[str, object] = {}
            exec(block.replace("127.0.0.1:50051", target), names)
        y = names["y"]
    assert y.shape == (4, 1536)  # type: ignore[attr-defined]
    assert names["v"].shape == (4, 384)  # type: ignore[attr-defined]


def test_two_packed_models_are_served_under_their_full_names(tmp_path: Path) -> None:
    """Pack twice under two names, serve the folder: bare module names are ambiguous then."""
    for name in ("first", "second"):
        command = [sys.executable, "-m", "qlinear_service", "pack", str(MODEL)]
        out = str(tmp_path / f"{name}.safetensors")
        subprocess.run([*command, "-o", out, "--name", name], check=True, capture_output=True)
    module = "encoder.layer.0.output.dense"
    with serving(tmp_path) as target, Client(target) as client:
        x = torch.randn(2, 1536).half()
        assert {layer.model for layer in client.list_layers()} == {"first", "second"}
        first, second = client.matmul([f"first/{module}", f"second/{module}"], x)
        assert torch.equal(first, second)
        with pytest.raises(Exception, match=f"first/{module}, second/{module}"):
            client.matmul(module, x)


def test_every_knob_of_the_readme_exists() -> None:
    command = [sys.executable, "-m", "qlinear_service", "serve", "--help"]
    flags = set(re.findall(r"--[a-z-]+", subprocess.check_output(command, text=True)))
    table = [line for line in (ROOT / "README.md").read_text().splitlines() if line[:3] == "| `"]
    named = {flag for line in table for flag in re.findall(r"`(--[a-z-]+)`", line)}
    assert len(named) >= 10
    assert named <= flags


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def test_inspect_names_every_layer_of_the_sample_model() -> None:
    command = [sys.executable, "-m", "qlinear_service", "inspect", str(MODEL), "--json"]
    report = json.loads(subprocess.check_output(command, text=True))
    assert json.dumps(report).count('"module"') == 36
