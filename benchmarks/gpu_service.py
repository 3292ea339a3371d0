"""What the service adds to a kernel on a GPU, and what a second stage is worth.

A large layer (4096 x 28672, 4 bits), float16, streamed: what a lone caller waits beyond the time of
the kernel, calls a second with 64 in flight, and the share of time in which the GPU computes, with
one and with two batches in flight. Needs a GPU and its kernels; takes about a minute.
"""

import argparse
import asyncio
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from callers import Loop, through_client
from processes import started

from qlinear_client import AsyncClient
from qlinear_service.dtypes import DType
from qlinear_service.gpu.made_up import made_up_layer
from qlinear_service.packed_writer import write_packed

N, K = 28672, 4096
LAYER = "bench/large"
STAGES = (1, 2)
ROWS = (1, 16)
IN_FLIGHT = 64
WARMUP_SECONDS = 1.0
BUSY = "qlinear_kernel_busy_seconds_total"
COUNT = "qlinear_kernel_seconds_count"


def write_model(folder: Path) -> Path:
    """Write a packed file with the one layer."""
    layer = made_up_layer(
        n=N, k=K, bits=4, group_size=128, symmetric=True, scale_dtype=DType.F16,
        device=torch.device("cpu"), model="bench", module="large",
    )  # fmt: skip
    path = folder / "bench.safetensors"
    write_packed(path, "bench", [layer], specs=[layer.spec])
    return path


def total(metrics: str, name: str) -> float:
    """Return the sum over all series of one metric."""
    with urlopen(f"http://{metrics}/metrics", timeout=20) as got:
        text = got.read().decode()
    values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


async def figures(target: str, metrics: str, rows: int, in_flight: int, seconds: float) -> Any:
    """Return what one kind of traffic gets and does."""
    x = np.random.default_rng(rows).standard_normal((rows, K)).astype(np.float16)
    async with AsyncClient(target) as client:
        await through_client(client, LAYER, x, in_flight=in_flight, seconds=WARMUP_SECONDS)
        busy, count = total(metrics, BUSY), total(metrics, COUNT)
        loop: Loop = await through_client(client, LAYER, x, in_flight=in_flight, seconds=seconds)
    busy, count = total(metrics, BUSY) - busy, total(metrics, COUNT) - count
    kernel = busy / count
    return {
        "rows": rows,
        "in_flight": in_flight,
        "p50_us": 1e6 * loop.percentile(50),
        "p99_us": 1e6 * loop.percentile(99),
        "kernel_us": 1e6 * kernel,
        "added_p50_us": 1e6 * (loop.percentile(50) - kernel),
        "calls_per_second": loop.calls / seconds,
        "calls_per_batch": loop.calls / count,
        "gpu_busy": busy / seconds,
    }


def measure(model: Path, stages: int, seconds: float) -> list[Any]:
    """Return the figures of one server."""
    metrics_port = 20000 + os.getpid() % 20000 + stages
    words = [
        *("-m", "qlinear_service", "serve", str(model), "--device", "cuda:0", "--port", "0"),
        *("--metrics-port", str(metrics_port), "--drain-delay-seconds", "0"),
        *("--log-level", "warning", "--max-batches-in-flight", str(stages)),
    ]
    metrics = f"127.0.0.1:{metrics_port}"
    with started(words, os.sched_getaffinity(0)) as server:
        return [
            asyncio.run(figures(server.target, metrics, rows, in_flight, seconds))
            for in_flight in (1, IN_FLIGHT)
            for rows in ROWS
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measure [4]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        results = {stages: measure(model, stages, args.seconds) for stages in STAGES}
    if args.json:
        print(json.dumps(results, indent=2))
        return
    print(f"k={K} n={N}, 4 bits, groups of 128, float16, through qlinear_client's stream")
    names = ["stages", *results[STAGES[0]][0]]
    print("  ".join(f"{name:>16}" for name in names))
    for stages, found in results.items():
        for one in found:
            cells = [str(stages), *(f"{value:.3g}" for value in one.values())]
            print("  ".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
