"""A server whose engine is slowed: each batch takes a fixed time longer. For overload.py.

All else is the real server, started as `qlinear serve` starts it.
"""

import asyncio
import functools
import sys
import threading
import time
from pathlib import Path

import torch

from qlinear_service.config import BatchingConfig, LimitsConfig, ServerConfig, ServiceConfig
from qlinear_service.config import KernelConfig as Kernel
from qlinear_service.dtypes import DType
from qlinear_service.kernels.backends import TorchKernels
from qlinear_service.layers import QuantizedLinear
from qlinear_service.loading import load
from qlinear_service.server import Loaded, serve

MOST_BATCH_ROWS = 8
MOST_ROWS = 512


class SlowKernels(TorchKernels):
    """Plain torch, and a pause for each batch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        """Return the product, late."""
        time.sleep(self._seconds)
        return super().linear(layer, x, output_dtype)


def main(path: str, seconds: str, age_seconds: str) -> None:
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

    sys.exit(asyncio.run(serve(config, loader, functools.partial(print, flush=True))))


if __name__ == "__main__":
    main(*sys.argv[1:])
