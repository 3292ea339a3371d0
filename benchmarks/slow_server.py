"""A server whose engine is slowed: each batch takes a fixed time longer. For overload.py.

All else is the real server, started as `qlinear serve` starts it. At its end it writes what it has
seen itself: how long refusals took from their arrival on, and how late its event loop was.
"""

import asyncio
import functools
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from qlinear_service.config import BatchingConfig, LimitsConfig, ServerConfig, ServiceConfig
from qlinear_service.config import KernelConfig as Kernel
from qlinear_service.dtypes import DType
from qlinear_service.kernels.backends import TorchKernels
from qlinear_service.layers import QuantizedLinear
from qlinear_service.loaded import Loaded
from qlinear_service.loading import load
from qlinear_service.metrics import Metrics
from qlinear_service.server import Loader, serve

MOST_BATCH_ROWS = 8
MOST_ROWS = 512
LAG_SECONDS = 0.002


class SlowKernels(TorchKernels):
    """Plain torch, and a pause for each batch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        """Return the product, late."""
        time.sleep(self._seconds)
        return super().linear(layer, x, output_dtype)


class Seen:
    """What the server itself knows of its refusals."""

    def __init__(self) -> None:
        self.refusals: list[float] = []
        """Seconds from a handler's start to the status, for a full queue."""
        self.lags: list[float] = []
        """By how much the event loop was late: as long may a call have waited for its handler."""

    def note_refusals(self) -> None:
        """Be told of every call that a server of this process ends from now on."""
        tell, refusals = Metrics.call_finished, self.refusals

        def noted(metrics: Metrics, *words: Any, **more: Any) -> None:
            if more.get("reason") in ("queue_rows", "queue_bytes"):
                refusals.append(words[3])
            tell(metrics, *words, **more)

        Metrics.call_finished = noted  # type: ignore[assignment, method-assign]

    async def watch_lag(self) -> None:
        """Look at the event loop's lateness until cancelled."""
        while True:
            slept = time.perf_counter()
            await asyncio.sleep(LAG_SECONDS)
            self.lags.append(time.perf_counter() - slept - LAG_SECONDS)


async def serve_watched(config: ServiceConfig, loader: Loader, seen: Seen) -> int:
    """Serve until SIGTERM; return the exit code."""
    watching = asyncio.create_task(seen.watch_lag())
    try:
        return await serve(config, loader, functools.partial(print, flush=True))
    finally:
        watching.cancel()


def main(path: str, seconds: str, age_seconds: str, seen_path: str) -> None:
    kernels = Kernel(device="cpu", torch_only=True, measure_seconds=0)
    config = ServiceConfig(
        server=ServerConfig(port=0, metrics_port=-1, drain_delay_seconds=0, log_level="error"),
        limits=LimitsConfig(
            max_request_rows=64, max_queue_rows=MOST_ROWS, max_queue_age_seconds=float(age_seconds)
        ),
        batching=BatchingConfig(max_batch_rows=MOST_BATCH_ROWS),
        kernels=kernels,
    )

    def loader(stop: threading.Event) -> Loaded:
        loaded = load(Path(path), kernels, stop)
        return Loaded(registry=loaded.registry, kernels=SlowKernels(float(seconds)))

    seen = Seen()
    seen.note_refusals()
    code = asyncio.run(serve_watched(config, loader, seen))
    Path(seen_path).write_text(json.dumps({"refusals": seen.refusals, "lags": seen.lags}))
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
