"""The planner of csrc/cuda/plan.cpp as Python sees it: what it weighs, what it takes, what can run.

Pure functions of a problem and a device, in the CPU library as well as in the CUDA one, so all of
it works on machines without a GPU. Knows no torch.
"""

import ctypes
from pathlib import Path
from typing import NamedTuple

from qlinear_service.dtypes import DType
from qlinear_service.errors import BuildError
from qlinear_service.kernels import cuda_abi
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.architectures import ARCHITECTURES
from qlinear_service.kernels.build import cpu_library
from qlinear_service.kernels.cuda_abi import CudaDevice, CudaFlag, CudaPlan, Status
from qlinear_service.kernels.cuda_library import find_cuda_library

__all__ = ["Candidate", "Planner", "load_planner", "problem"]


class Candidate(NamedTuple):
    """A plan that can run, and what the model of docs/kernel.md expects of it."""

    microseconds: float
    plan: CudaPlan


class Planner:
    """The planner of a loaded library.

    Args:
        library: either of ours, the CPU's or the GPU's.

    Raises:
        AttributeError: it is another one.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = cuda_abi.declare(library, cuda_abi.PLANNER_FUNCTIONS)

    def candidates(
        self, params: LinearParams, device: CudaDevice, flags: CudaFlag = CudaFlag.NONE
    ) -> list[Candidate]:
        """Return every arrangement that the planner weighs, in its order.

        It takes the first of the least microseconds.

        Raises:
            ValueError: the library knows no such problem, or no GPU is as `device` says.
        """
        count = ctypes.c_int64()
        ask = self._library.ql_cuda_plan_candidates
        self._check(ask(params, device, flags, 0, None, None, count), params, device)
        plans, times = (CudaPlan * count.value)(), (ctypes.c_double * count.value)()
        self._check(ask(params, device, flags, count.value, plans, times, count), params, device)
        return [Candidate(*pair) for pair in zip(times, plans, strict=True)]

    def choice(
        self, params: LinearParams, device: CudaDevice, flags: CudaFlag = CudaFlag.NONE
    ) -> Candidate:
        """Return what the planner takes.

        Raises:
            ValueError: as `candidates`, or no plan for it can run.
        """
        found = self.candidates(params, device, flags)
        if not found:
            why = "too little shared memory or too many tiles"
            raise ValueError(f"{_words(params, device)}: none can run, for {why}")
        return min(found, key=lambda candidate: candidate.microseconds)

    def complete(self, params: LinearParams, device: CudaDevice, plan: CudaPlan) -> str:
        """Fill in what follows from the rest of `plan`; return why it cannot run, "" if it can."""
        fault = ctypes.c_char_p()
        status = self._library.ql_cuda_complete_plan(params, device, plan, fault)
        if status == Status.OK:
            return ""
        return (fault.value or self._library.ql_status_text(status)).decode()

    def _check(self, status: int, params: LinearParams, device: CudaDevice) -> None:
        if status != Status.OK:
            text = self._library.ql_status_text(status).decode()
            raise ValueError(f"{_words(params, device)}: {text} (status {status})")


def problem(
    *, m: int, n: int, k: int, bits: int, group_size: int, dtype: DType = DType.F16
) -> LinearParams:
    """Return the params of y[m, n] = x[m, k] W^T without data: symmetric codes, `dtype` for all."""
    return LinearParams(
        m=m, n=n, k=k, bits=bits, group_size=group_size, x_row_stride=k, y_row_stride=n, threads=1,
        x_dtype=dtype, compute_dtype=dtype, scale_dtype=dtype, bias_dtype=dtype, y_dtype=dtype,
        weights_fit=1,
    )  # fmt: skip


def load_planner(cache_dir: Path) -> Planner:
    """Return the planner of the CPU library, built if need be, else of a CUDA library that is here.

    Raises:
        BuildError: there is neither, with the reason.
    """
    try:
        with cpu_library(cache_dir) as path:
            return Planner(ctypes.CDLL(str(path)))
    except BuildError as error:
        for architecture in ARCHITECTURES:  # a library for any GPU plans for all
            path_found, _ = find_cuda_library(cache_dir, (architecture,))
            if path_found is not None:
                return Planner(ctypes.CDLL(str(path_found)))
        raise error


def _words(params: LinearParams, device: CudaDevice) -> str:
    sizes = f"m={params.m} n={params.n} k={params.k} bits={params.bits} g={params.group_size}"
    return f"no plan for {sizes} on {device.name.decode()!r}"
