"""`qlinear serve`, whose launches fail and take long now and then. Usage: server.py SEED FLAGS...

A launch that computes rows of several calls fails at random: none of them may be told. One that
holds a poisoned row fails always: its call is told, its neighbours are not. All else is real.
"""

import os
import random
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("tests", "proto", "service")]

from qlinear_service.process import tune_process  # noqa: E402

tune_process(os.environ)

import torch  # noqa: E402
from chaos.truth import POISON, POOL_ROWS, ROWS_PER_UNIT  # noqa: E402

from qlinear_service import cli, loading  # noqa: E402
from qlinear_service.config import KernelConfig  # noqa: E402
from qlinear_service.dtypes import DType  # noqa: E402
from qlinear_service.gpu import choice  # noqa: E402
from qlinear_service.kernels.backends import Kernels  # noqa: E402
from qlinear_service.layers import QuantizedLinear  # noqa: E402

FAILURES = 0.03
PAUSES = 0.02
LONGEST_PAUSE_SECONDS = 0.06
INJECTED = (
    RuntimeError("injected: the launch failed"),
    MemoryError("injected: out of memory"),
    ZeroDivisionError("injected: a bug"),
)


class FaultyKernels:
    """The real kernels, and accidents."""

    def __init__(self, kernels: Kernels, seed: int) -> None:
        self._kernels = kernels
        self._draw = random.Random(f"kernels {seed}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        """Compute, or do not."""
        first = x[:, 0].float()
        if (first == POISON).any():
            raise RuntimeError("injected: poison")
        steps = (first.diff() * ROWS_PER_UNIT) % POOL_ROWS
        if (steps != 1).any() and self._draw.random() < FAILURES:
            raise self._draw.choice(INJECTED)
        # What runs on the event loop is quick by measurement: a pause there would be another fault.
        in_thread = threading.current_thread() is not threading.main_thread()
        if in_thread and self._draw.random() < PAUSES:
            time.sleep(self._draw.uniform(0, LONGEST_PAUSE_SECONDS))
        return self._kernels.linear(layer, x, output_dtype)


def main(seed: int, words: list[str]) -> int:
    """Serve with faults; with an odd seed all batches are computed in the engine's thread."""
    load = loading.load

    def faulty(path: Path, config: KernelConfig, stop: threading.Event) -> loading.Loaded:
        loaded = load(path, replace(config, device="cpu"), stop)
        if "CHAOS_LIBRARY" in os.environ:
            from chaos.pretended_gpu import on_pretended_gpu

            return on_pretended_gpu(loaded, Path(os.environ["CHAOS_LIBRARY"]), seed)
        loaded = replace(loaded, kernels=FaultyKernels(loaded.kernels, seed))  # type: ignore[arg-type]
        return replace(loaded, roofline=None) if seed % 2 else loaded

    # What `qlinear serve` imports when it begins to serve.
    loading.load = faulty
    choice.choose_device = lambda config: choice.Choice(config=config, why="it is pretended")
    return cli.main(["serve", *words])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
