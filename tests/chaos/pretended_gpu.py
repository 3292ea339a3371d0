"""A GPU that is none under the server of a chaos run: the dispatcher is real, the device pretends.

It fails as server.py lets kernels fail: batches of several calls at random, poisoned rows always.
"""

import atexit
import ctypes
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from chaos.truth import POISON
from fake_cuda import HostKernels, build_fake, pretend_streams

from qlinear_service.gpu import streams
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.kernels import unquantized
from qlinear_service.layers import QuantizedLinear
from qlinear_service.loaded import Loaded

__all__ = ["build_fake", "gathers", "on_pretended_gpu"]

FAILURES_PER_THOUSAND, PAUSES_PER_THOUSAND = 30, 10


def on_pretended_gpu(loaded: Loaded, library: Path, seed: int) -> Loaded:
    """Return what was loaded onto the host as if it were on a GPU; once in a process."""
    pretend_streams(pytest.MonkeyPatch())
    kernels = HostKernels(library)
    chaos = kernels.library.fake_chaos
    chaos.argtypes = (ctypes.c_int, ctypes.c_float, ctypes.c_int, ctypes.c_int)
    chaos(seed, POISON, FAILURES_PER_THOUSAND, PAUSES_PER_THOUSAND)
    atexit.register(_note_gathers, kernels, library)
    fill = unquantized.fill

    def poisoned(layer: QuantizedLinear, x: torch.Tensor, y: torch.Tensor, **more: Any) -> None:
        if (x[:, 0].float() == POISON).any():
            raise RuntimeError("injected: poison")
        fill(layer, x, y, **more)

    streams.unquantized.fill = poisoned
    return replace(loaded, gpu=CudaStreams(kernels))


def gathers(library: Path) -> int:
    """Return how many batches the processes that ended in order have read from the slab."""
    return sum(map(int, _notes(library).read_text().split()))


def _notes(library: Path) -> Path:
    return library.with_suffix(".gathers")


def _note_gathers(kernels: HostKernels, library: Path) -> None:
    with _notes(library).open("a") as notes:
        print(kernels.library.fake_row_gathers(), file=notes)
