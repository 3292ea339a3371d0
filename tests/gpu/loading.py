"""Which library and which kernels the GPU tests run with, or why they are skipped."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qlinear_service.dtypes import DType
from qlinear_service.errors import BuildError
from qlinear_service.kernels.architectures import chosen_architectures
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.kernels.cuda_library import find_cuda_library
from qlinear_service.kernels.library_cache import default_cache_dir
from qlinear_service.layers import QuantizedLinear

VARIABLE = "QLINEAR_CUDA_LIBRARY"
HIT: set[int] = set()
"""Numbers of the kernels that have run so far."""


class Missing(Exception):
    """There is no GPU or no library here; the text says which."""


def library_path() -> Path:
    """Return the library that the variable names, or one that is built and fits this GPU."""
    if not torch.cuda.is_available():
        raise Missing("no GPU that torch can use")
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    try:
        found, why_not = find_cuda_library(default_cache_dir(), chosen_architectures(("native",)))
    except BuildError as error:
        raise Missing(str(error)) from error
    if found is None:
        raise Missing(f"no library: {why_not}; build one, or name one with {VARIABLE}")
    return found


class RecordingKernels(CudaKernels):
    """The kernels, and a note of each that ran."""

    def linear(
        self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType, **options: Any
    ) -> torch.Tensor:
        if len(x):
            plan = self.plan(layer, len(x), DType.F32 if x.dtype == torch.float32 else _dtype(x),
                             output_dtype)  # fmt: skip
            HIT.add(plan.kernel)
        return super().linear(layer, x, output_dtype, **options)


def _dtype(x: torch.Tensor) -> DType:
    return DType.F16 if x.dtype == torch.float16 else DType.BF16


def open_kernels(**options: Any) -> RecordingKernels:
    """Return kernels over the library of these tests."""
    return RecordingKernels(library_path(), **options)


@contextmanager
def memory_of_its_own() -> Iterator[None]:
    """Give back what a large test took, so that the next one finds room."""
    yield
    torch.cuda.empty_cache()
