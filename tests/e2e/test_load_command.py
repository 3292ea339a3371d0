"""`qlinear load` against a real server process: both loops, the report, and wrong answers."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from random_layers import random_layer

from qlinear_service.kernels.packing import pack
from qlinear_service.layers import QuantizedLinear
from qlinear_service.packed_writer import write_packed

WAIT_SECONDS = 60
UP, DOWN = "toy/up", "toy/down"
DTYPES = ("float16", "bfloat16", "float32")
SHORT = ("--duration", "1", "--warmup", "0.2")


def layers() -> list[QuantizedLinear]:
    return [
        pack(random_layer(n=40, k=96, group_size=32, bias=True, model="toy", module="up", seed=1)),
        pack(random_layer(n=24, k=128, model="toy", module="down", seed=2)),
    ]


def write(path: Path, packed: list[QuantizedLinear], model: str = "toy") -> Path:
    write_packed(path, model, packed, specs=[layer.spec for layer in packed])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("served") / "toy.safetensors", layers())


@pytest.fixture(scope="module")
def target(model: Path) -> Iterator[str]:
    """A server process on a free port of this machine."""
    words = ["serve", str(model), "--port", "0", "--metrics-port", "0", "--torch-only"]
    words += ["--drain-delay-seconds", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "qlinear_service", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("ready on "):
                yield line.split()[-1]
                break
    finally:
        process.kill()
        process.communicate()


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "qlinear_service", "load", *words]


def load(target: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("--target", target, *SHORT, *words),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    return report


def test_closed_loop_reports_every_kind_and_checks_answers(target: str, model: Path) -> None:
    words = ["--rows", "1,7", "--dtype", ",".join(DTYPES), "--concurrency", "4"]
    report = report_of(load(target, *words, "--check", str(model), "--json", "-", "--seed", "5"))
    run, total = report["run"], report["total"]
    assert (run["loop"], run["concurrency"], run["seed"]) == ("closed", 4, 5)
    assert 0.9 < run["seconds"] <= 1
    kinds = {(line["layer"], line["rows"], line["dtype"]) for line in report["series"]}
    assert kinds == {(n, m, d) for n in (UP, DOWN) for m in (1, 7) for d in DTYPES}
    assert total["answered"] == total["sent"] == sum(line["sent"] for line in report["series"])
    assert total["failed"] == {}
    # Four callers, each with a call of up to 7 rows under way at either end of the window.
    rows = sum(line["answered"] * line["rows"] for line in report["series"])
    edges = 2 * 4 * 7
    assert total["rows_per_second"] * run["seconds"] == pytest.approx(rows, abs=edges)
    latency = total["latency_seconds"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["p99.9"]
    assert latency["p99.9"] <= latency["max"]
    check = report["check"]
    assert check["against"] == f"the exact result from {model}"
    assert 0 < check["checked"] <= 200
    assert (check["wrong"], check["not_checked"]) == (0, 0)


def test_open_loop_sends_at_its_rate(target: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = load(target, "--rate", "200", "--layer", "up", "--json", str(path), "--fail-on-error")
    assert done.returncode == 0, done.stderr
    assert "open loop, 200 calls/s" in done.stdout
    assert "WRONG" in done.stdout
    report = json.loads(path.read_text())
    # Poisson with mean 200: five standard deviations.
    assert 130 < report["total"]["sent"] < 270
    assert {line["layer"] for line in report["series"]} == {UP}
    check = report["check"]
    assert check["against"] == "the same call sent alone after the load"
    assert check["checked"] > 100
    assert (check["wrong"], check["not_checked"]) == (0, 0)


def test_a_server_of_other_weights_is_found_out(target: str, tmp_path: Path) -> None:
    changed = layers()
    scales = changed[1].scales.clone()
    scales[0, 0, 3] *= 1.01  # one scale of one feature, by a hundredth
    changed[1] = replace(changed[1], scales=scales)
    path = write(tmp_path / "toy.safetensors", changed)
    done = load(target, "--check", str(path), "--json", "-")
    assert done.returncode == 1
    check = json.loads(done.stdout)["check"]
    assert 0 < check["wrong"] < check["checked"]
    assert check["first_problem"].startswith(DOWN)
    assert "first wrong answer: toy/down" in done.stderr


@pytest.mark.parametrize("fault", ["model", "shape"])
def test_files_of_another_model_are_refused_before_anything_is_sent(
    target: str, tmp_path: Path, fault: str
) -> None:
    other = [replace(layer, spec=replace(layer.spec, model="other")) for layer in layers()]
    if fault == "shape":
        other = [pack(random_layer(n=41, k=96, model="toy", module="up")), *layers()[1:]]
    path = write(tmp_path / "x.safetensors", other, "other" if fault == "model" else "toy")
    done = load(target, "--check", str(path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"qlinear load: {path}")
    assert done.stderr.count("\n") == 1
    assert "toy/" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--layer", "upp"], 1, "name one of: toy/up\n"),
        (["--rows", "70000"], 1, "takes 65536 at most"),
        (["--rows", "1,x"], 2, "expected a whole number, 1 or more"),
        (["--dtype", "float64"], 2, "expected one of float16, bfloat16, float32"),
        (["--rate", "1", "--concurrency", "1"], 2, "not allowed with"),
    ],
)
def test_mistakes_are_said(target: str, words: list[str], code: int, text: str) -> None:
    done = load(target, *words)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_no_server_is_one_line() -> None:
    done = load("127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("qlinear load: 127.0.0.1:1: UNAVAILABLE: ")
    assert done.stderr.count("\n") == 1


def test_calls_that_fail_are_counted_and_fail_the_run_if_asked(target: str) -> None:
    words = ["--timeout", "0.001", "--concurrency", "64", "--json", "-"]
    done = load(target, *words, "--fail-on-error")
    assert done.returncode == 1
    total = json.loads(done.stdout)["total"]
    assert total["failed"].keys() == {"DEADLINE_EXCEEDED"}
    assert total["failed"]["DEADLINE_EXCEEDED"] == total["sent"] - total["answered"]


def test_an_interrupted_run_reports_what_was_done(target: str) -> None:
    words = ["--target", target, "--duration", "60", "--warmup", "0", "--json", "-"]
    process = subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("seed ")
    time.sleep(1)  # there is no event to wait for: the run is to be in its middle
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130, err
    report = json.loads(out)
    assert report["run"]["interrupted"] is True
    assert 0 < report["run"]["seconds"] < 30
    total = report["total"]
    assert total["answered"] + total["unanswered"] == total["sent"] > 0
    assert report["check"]["wrong"] == 0
