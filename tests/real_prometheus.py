"""A Prometheus process on the loopback address, and a server under load that it scrapes.

The shipped configuration with three changes: the target, and scrapes and rules every second.
"""

import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import grpc
import yaml
from prometheus_tools import PROMETHEUS, tool
from source_tree import ROOT

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc

MODEL = ROOT / "examples/models/all-MiniLM-L6-v2"
LAYER, K = "encoder.layer.0.attention.self.query", 384
WAIT_SECONDS = 60.0
SMALL_QUEUE = ("--max-request-rows", "16", "--max-queue-rows", "64")


def until(what: str, is_so: Any) -> Any:
    """Return the first true answer of `is_so`; asked until the wait is over."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        if answer := is_so():
            return answer
        time.sleep(0.2)
    raise AssertionError(f"not within {WAIT_SECONDS:g} s: {what}")


@dataclass(frozen=True)
class Watched:
    """A server and the Prometheus that scrapes it."""

    target: str
    metrics: str
    prometheus: str

    def exposition(self) -> str:
        """Return what the server shows now."""
        with urlopen(f"http://{self.metrics}/metrics", timeout=20) as got:
            return str(got.read().decode())

    def api(self, path: str, **words: str) -> Any:
        """Return what an endpoint of Prometheus answers."""
        with urlopen(f"http://{self.prometheus}/api/v1/{path}?{urlencode(words)}") as got:
            return json.load(got)["data"]

    def values(self, query: str) -> list[float]:
        """Return the numbers of an instant query; what is not a number is no data."""
        result = self.api("query", query=query)["result"]
        values = [float(sample["value"][1]) for sample in result]
        return [value for value in values if math.isfinite(value)]


@contextmanager
def running(*words: str | Path, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a process until the end of the block."""
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, text=True, **more)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_SECONDS)


@contextmanager
def served_model(*more: str, model: Path = MODEL) -> Iterator[tuple[str, str]]:
    """Serve the sample model, or another, in a process of its own; its two addresses."""
    words = [sys.executable, "-m", "qlinear_service", "serve", model, "--device", "cpu"]
    words += ["--port", "0", "--metrics-port", "0", "--drain-delay-seconds", "0", *more]
    with running(*words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().split() for _ in range(3)]
        assert [line[0] for line in said] == ["listening", "metrics", "ready"]
        yield said[0][-1], said[1][-1]


@contextmanager
def under_load(target: str, *words: str) -> Iterator[None]:
    """Send calls of one and of 16 rows until the end of the block."""
    command = [sys.executable, "-m", "qlinear_service", "load", "--target", target]
    command += ["--rows", "1,16", "--duration", "600", "--check-samples", "0", *words]
    with running(*command, stdout=subprocess.DEVNULL):
        yield


@contextmanager
def prometheus(
    folder: Path, metrics: str, *flags: str, config: str = "prometheus.yml"
) -> Iterator[str]:
    """Run Prometheus with the shipped rules and a shipped configuration; its address."""
    made = yaml.safe_load((PROMETHEUS / config).read_text())
    made["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    made["scrape_configs"][0]["static_configs"] = [{"targets": [metrics]}]
    made["rule_files"] = [str(PROMETHEUS / name) for name in made["rule_files"]]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(made))
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}", *flags]
    with running(tool("prometheus"), *words, f"--web.listen-address={address}"):
        until("Prometheus is ready", lambda: _answers(f"http://{address}/-/ready"))
        yield address


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as got:
            return bool(got.status == 200)
    except URLError:
        return False


def _cancel_calls(watched: Watched) -> None:
    """Take calls back until the server has noticed one of them in time."""
    x = pb.Tensor(dtype=1, shape=[16, K], data=bytes(16 * K * 2))
    with grpc.insecure_channel(watched.target) as channel:
        stub = pb_grpc.QuantizedLinearStub(channel)

        def noticed() -> bool:
            for _ in range(8):
                call = stub.MatMul.future(pb.MatMulRequest(layer=LAYER, x=x))
                time.sleep(0.005)
                call.cancel()
            return "qlinear_cancelled_total" in watched.exposition()

        until("a cancelled call is counted", noticed)


@contextmanager
def watched_server(folder: Path) -> Iterator[Watched]:
    """A server that is asked for more than it does, with late and cancelled calls, and watched."""
    tool("prometheus")
    with ExitStack() as stack:
        target, metrics = stack.enter_context(served_model(*SMALL_QUEUE))
        watched = Watched(target, metrics, stack.enter_context(prometheus(folder, metrics)))
        stack.enter_context(under_load(target, "--concurrency", "64", "--transport", "unary"))
        stack.enter_context(under_load(target, "--concurrency", "4", "--timeout", "0.001"))
        _cancel_calls(watched)
        yield watched
