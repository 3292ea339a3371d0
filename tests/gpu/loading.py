"""Which library and which kernels the GPU tests run with, or why they are skipped."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qlinear_service.errors import BuildError
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.architectures import chosen_architectures
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.kernels.cuda_abi import CudaDevice, CudaLaunch, CudaPlan, Status
from qlinear_service.kernels.cuda_library import find_cuda_library
from qlinear_service.kernels.library_cache import default_cache_dir

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


class RecordingLibrary:
    """The library, with a note of each linear kernel that the planner took."""

    def __init__(self, library: ctypes.CDLL, info: CudaDevice) -> None:
        self._library, self._info = library, info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def ql_cuda_linear(self, params: LinearParams | None, launch: CudaLaunch | None) -> int:
        """Launch, and note what ran."""
        status: int = self._library.ql_cuda_linear(params, launch)
        if status == Status.OK and params is not None and launch is not None and not launch.plan:
            plan = CudaPlan()
            if self._library.ql_cuda_plan_linear(params, self._info, launch.flags, plan) == 0:
                HIT.add(plan.kernel)
        return status


class RecordingKernels(CudaKernels):
    """The kernels, and a note of each that ran."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.library = RecordingLibrary(self.library, self.info)  # type: ignore[assignment]


def open_kernels(**options: Any) -> RecordingKernels:
    """Return kernels over the library of these tests."""
    return RecordingKernels(library_path(), **options)


@contextmanager
def memory_of_its_own() -> Iterator[None]:
    """Give back what a large test took, so that the next one finds room."""
    yield
    torch.cuda.empty_cache()
