"""`qlinear call` against the fake server: files in, files out, one line for every failure."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qlinear_service.cli import main

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]


def call(fake: Any, source: object, target: object, *more: str) -> int:
    words = ["call", "toy/a", "--in", str(source), "--out", str(target)]
    return main([*words, "--target", fake.target, *more])


@pytest.mark.parametrize("dtype", DTYPES)
def test_answer_is_written_under_the_very_name_given(fake: Any, tmp_path: Path, dtype: Any) -> None:
    x = np.arange(12).reshape(2, 6).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    assert call(fake, tmp_path / "x.npy", tmp_path / "answer") == 0
    y = np.load(tmp_path / "answer", allow_pickle=False).view(dtype)
    assert np.array_equal(
        y.astype(np.float32), (x.astype(np.float32) @ fake.layers["toy/a"].T).astype(dtype)
    )


def test_output_dtype(fake: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 6), np.float32))
    out = tmp_path / "y.npy"
    assert call(fake, tmp_path / "x.npy", out, "--output-dtype", "float16") == 0
    assert np.load(out).dtype == np.float16


def test_pipes(fake: Any) -> None:
    x = np.ones((1, 6), np.float32)
    raw = io.BytesIO()
    np.save(raw, x)
    words = ["call", "toy/a", "--in", "-", "--out", "-", "--target", fake.target]
    done = subprocess.run(
        [sys.executable, "-m", "qlinear_service", *words],
        input=raw.getvalue(),
        capture_output=True,
        timeout=60,
        check=True,
    )
    y = np.load(io.BytesIO(done.stdout))
    assert np.array_equal(y, x @ fake.layers["toy/a"].T)
    assert done.stderr.decode() == "toy/a: [1, 6] float32 -> [1, 4] float32\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"hello", "not a .npy file; save one array"),
        (b"", "not a .npy file; save one array"),
        (b"PK\x03\x04 and no archive", "not a .npy file; save one array"),
        (b"\x80\x04N.", "not a .npy file; save one array"),
        ("huge", "not a .npy file of numbers, or not all of one"),
        ("pickle", "not a .npy file of numbers"),
        ("archive", "an archive of several arrays"),
        ("float64", "INVALID_ARGUMENT: x has dtype float64"),
        ("truncated", "not a .npy file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(
    fake: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: Any,
    words: str,
) -> None:
    path = tmp_path / "x.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "huge":
        np.save(path, np.ones((1, 6), np.float32))
        path.write_bytes(path.read_bytes().replace(b"(1, 6)", b"(1,10000000000000000,)", 1)[:128])
    elif content == "pickle":
        np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    elif content == "archive":
        with path.open("wb") as file:
            np.savez(file, a=np.ones(3))
    elif content == "float64":
        np.save(path, np.ones((1, 6)))
    elif content == "truncated":
        np.save(path, np.ones((1, 6), np.float32))
        path.write_bytes(path.read_bytes()[:-1])
    assert call(fake, path, tmp_path / "y.npy") == 1
    text = capsys.readouterr().err
    assert words in text
    assert "allow_pickle" not in text
    assert text.startswith("qlinear call: ")
    assert text.count("\n") == 1
    assert not (tmp_path / "y.npy").exists()


def test_a_failed_call_names_target_and_status(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 6), np.float32))
    fake.layers.clear()
    assert call(fake, tmp_path / "x.npy", tmp_path / "y.npy") == 1
    assert f"{fake.target}: NOT_FOUND: no layer is called 'toy/a'" in capsys.readouterr().err


def test_an_output_that_cannot_be_written(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 6), np.float32))
    assert call(fake, tmp_path / "x.npy", tmp_path / "missing" / "y.npy") == 1
    assert "No such file" in capsys.readouterr().err


def test_runs_without_torch(fake: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 6), np.float32))
    out = tmp_path / "y.npy"
    words = ["call", "toy/a", "--in", str(tmp_path / "x.npy"), "--out", str(out)]
    script = (
        "import sys\n"
        "for name in ('torch', 'prometheus_client', 'grpc_health', 'safetensors', 'rich'):\n"
        "    sys.modules[name] = None\n"
        "from qlinear_service.cli import main\n"
        f"sys.exit(main({[*words, '--target', fake.target]!r}))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert out.exists()
