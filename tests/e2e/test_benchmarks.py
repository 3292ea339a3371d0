"""Each benchmark runs from end to end with tiny numbers, and its JSON holds what it promises."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qlinear_service.cli import main
from qlinear_service.commands.bench import BENCHMARKS
from qlinear_service.kernels.driver import ask_driver

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they read /proc")

WAIT_SECONDS = 110


def bench(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "qlinear_service", "bench", *words, "--json", "-"],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["machine"]["grpcio"]
    assert report["others_cores"] >= 0
    assert isinstance(report, dict)
    return report


@pytest.mark.slow
def test_service() -> None:
    report = bench("service", "--runs", "1", "--seconds", "0.15")
    transports = [row["transport"] for row in report["server"]]
    assert transports[0] == "unary"
    for row in report["server"]:
        assert row["qlinear_cpu_seconds"] > 0
        assert row["lowest"] <= row["ratio"] <= row["highest"]
        assert row["target"] == 1.6
    assert len(report["latency"]) == 4 * len(transports)
    for row in report["latency"]:
        assert 0 < row["p50_seconds"] <= row["p99_seconds"]
    for row in report["client"]:
        assert row["sum_cpu_seconds"] > max(row["client_cpu_seconds"], row["server_cpu_seconds"])


@pytest.mark.slow
def test_invariance() -> None:
    report = bench("invariance", "--runs", "1", "--features", "256")
    costs = {(row["way"], row["rows"]): row["cost"] for row in report["invariance"]}
    # One product for each row, of which a single row has one in any case.
    assert costs["plain torch", 1024] > 1.5 * costs["plain torch", 1]


@pytest.mark.slow
def test_schedule() -> None:
    report = bench("schedule", "--calls", "400")
    (found,) = report["curves"].values()
    assert found["sweet_spot_rows"] == 8
    by_trace: dict[str, dict[str, Any]] = {}
    for row in found["figures"]:
        by_trace.setdefault(row["trace"], {})[row["policy"]] = row
        assert 0 < row["p50_seconds"] <= row["p99_seconds"]
        assert row["rows_per_second"] > 0
    assert len(by_trace) == 7
    for policies in by_trace.values():
        assert set(policies) == {"qlinear", "fifo", "window 1 ms"}
        assert len({row["calls"] for row in policies.values()}) == 1
    assert report["overhead"]["batch_seconds"] < 0.01


@pytest.mark.slow
def test_overload() -> None:
    report = bench("overload", "--seconds", "3")["overload"]
    assert sum(report["ends"].values()) == report["sent"] > 0
    assert set(report["ends"]) <= {"answered", "full", "too old"}
    assert report["ends"]["answered"] > 0
    assert report["without_pushback"] == 0
    assert len(report["goodputs"]) == 6
    if report["ends"].get("full"):  # a slow machine fills no queue in so short a time
        assert 0 < report["server_refusal_p50_seconds"] < report["refusal_p50_seconds"]
    assert report["server_lag_p50_seconds"] >= 0


@pytest.mark.slow
def test_slab() -> None:
    words = ("--k", "256", "--n", "256", "--seconds", "0.2", "--loads", "0.1", "0.3")
    (found,) = bench("slab", *words)["slab"]  # on a CPU there is one way to the engine
    assert found["capacity_rows_per_second"] > 0
    assert 0 < found["lone"]["added_seconds"] < found["lone"]["total_seconds"]
    assert [row["load"] for row in found["loads"]] == [0.1, 0.3]
    for row in found["loads"]:
        assert row["answered"] > 0
        assert row["rows_per_batch"] >= 1


@pytest.mark.slow
def test_cpu_operation() -> None:
    report = bench("cpu", "--runs", "1", "--seconds", "0.001", "--features", "256")
    rows = report["operation"]
    assert [(row["dtype"], row["rows"]) for row in rows] == [
        (dtype, m) for dtype in ("bfloat16", "float16", "float32") for m in (1, 4, 16, 64, 256)
    ]
    judged = [row["rows"] for row in rows if row["target"] is not None]
    assert judged == [1, 16, 64]
    for row in rows:
        assert row["wall_seconds"].keys() == {"qlinear", "torch int4", "dense"}
        assert row["cpu_ratio"] > 0
    assert report["resident_weight_ratio"] > 0


@pytest.mark.slow
def test_soak() -> None:
    report = bench("soak", "--calls", "400")
    assert report["calls"] == 400
    assert len(report["anonymous_bytes"]) == 40
    assert report["peak_bytes"] == max(report["anonymous_bytes"]) > 1 << 20


def test_a_benchmark_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "nothing"])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert all(name in text for name in ("cpu", "kernel", "service", "soak"))


@pytest.mark.parametrize(
    "words", [["gpus"], ["slab", "--device", "cuda:99"], ["invariance", "--device", "cuda:99"]]
)
def test_a_gpu_that_is_not_there_is_one_sentence(words: list[str]) -> None:
    if words == ["gpus"] and ask_driver().gpus:
        pytest.skip("it would measure")
    command = [sys.executable, "-m", "qlinear_service", "bench", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"qlinear bench {words[0]}: device is cuda:")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("what", ["ablation", "mix"])
def test_what_measures_gpu_kernels_needs_a_gpu(what: str) -> None:
    if not ask_driver().problem:
        pytest.skip("it would measure")
    words = ["--run", "nowhere"] if what == "ablation" else []
    command = [sys.executable, "-m", "qlinear_service", "bench", what, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"qlinear bench {what}: needs a CUDA GPU; {ask_driver().problem}\n"


def children_of(pid: int) -> list[int]:
    """Wait until a process has started others, and return them."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found:
            return [int(word) for word in found]
        time.sleep(0.01)
    raise AssertionError("it has started nothing")


def has_ended(pid: int) -> bool:
    """Say whether a process is gone, or would be if its parent had looked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("what", "deep"), [("cpu", 1), ("service", 1), ("service", 2)], ids=["cpu", "early", "late"]
)
def test_ctrl_c_ends_a_benchmark_and_its_servers_with_one_line(what: str, deep: int) -> None:
    # Whatever runs these tests in the background has them ignore the signal, and all they start.
    words = ["env", "--default-signal=INT", sys.executable, "-m", "qlinear_service", "bench", what]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    last = process.pid
    for _ in range(deep):
        last = children_of(last)[0]
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    said = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, said) == (130, ("", f"qlinear bench {what}: interrupted\n"))
    end = time.monotonic() + WAIT_SECONDS / 2
    while not has_ended(last):
        assert time.monotonic() < end, "what it started goes on"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("what", sorted(BENCHMARKS))
def test_help_calls_a_benchmark_what_its_users_do(what: str) -> None:
    words = [sys.executable, "-m", "qlinear_service", "bench", what, "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_SECONDS, check=True)
    assert done.stdout.startswith(f"usage: qlinear bench {what} ")
    called = set(re.findall(r"^  --[a-z-]+ ([^\s[]+)", done.stdout, re.MULTILINE))
    assert called
    assert not called & {"S", "M", "JSON", "COMMIT", "FOLDER", "DEVICES", "ONLY", "DIVISOR"}


def test_help_of_a_benchmark_is_its_own() -> None:
    words = [sys.executable, "-m", "qlinear_service", "bench", "soak", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_SECONDS, check=True)
    assert "--calls" in done.stdout


@pytest.mark.slow
def test_checkpoint() -> None:
    """Two blocks of the 7B shape: figures are there, and memory, no matter of time, is bounded."""
    report = bench("checkpoint", "--blocks", "2", "--runs", "1", "--loads", "1")
    figures = report["checkpoint"]
    assert figures["code_bytes"] == 2 * 101187584
    assert figures["packed_bytes"] > figures["code_bytes"]
    for name in ("pack_mb_per_second", "pack_over_copy", "load_gb_per_second", "cat_over_load"):
        assert figures[name] > 0
    assert 0 < figures["peak_layers"] < 2


@pytest.mark.slow
def test_metrics() -> None:
    report = bench("metrics", "--starts", "2", "--runs", "1", "--seconds", "0.1", "--only", "off")
    rows = {(row["transport"], row["case"]): row for row in report["calls"]}
    assert list(rows) == [(way, case) for way in ("unary", "stream") for case in ("off", "on")]
    for row in rows.values():
        assert row["cpu_seconds"] > 0
        assert row["compared"] == "off"
        assert row["lowest"] <= row["paired"] <= row["highest"]
    assert report["scrape"]["layers"] == 200
    assert 0 < report["scrape"]["median_seconds"] <= report["scrape"]["highest_seconds"]
