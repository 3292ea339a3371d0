"""Stand-ins for GPU and CUDA library, for the benchmarks of kernels: the CPU computes.

The stand-in library computes with the CPU kernels, so what it is given must be right.
"""

import ctypes
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from kernel_gpu import Call, Gpu, Graph
from kernel_ours import Library

from qlinear_service.dtypes import DType
from qlinear_service.kernels import build
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda_abi import CudaDevice, CudaPlan, Status


class StandInGpu(Gpu):
    """The same on the CPU: a graph is its calls."""

    def __init__(self) -> None:
        self.device = torch.device("cpu", 0)
        self.stream = SimpleNamespace(cuda_stream=0)
        self._pools: dict[str, torch.Tensor] = {}

    def record(self, calls: Sequence[Call]) -> Graph:
        calls[0]()
        return Graph(calls, len(calls))  # type: ignore[arg-type]

    def replay_us(self, recorded: Graph) -> float:
        started = time.perf_counter()
        for call in recorded.graph:  # type: ignore[attr-defined]
            call()
        return (time.perf_counter() - started) * 1e6 / recorded.launches

    def spin_up(self, seconds: float = 0.0) -> None:
        """The CPU is awake."""

    def is_lost(self) -> bool:
        return False


class StandInFunctions:
    """The CUDA library's functions, computed by the CPU library."""

    def __init__(self, spoil: Callable[[LinearParams], None] | None = None) -> None:
        self._cpu = ctypes.CDLL(str(build.build_cpu_library(build.default_cache_dir())))
        self._spoil = spoil
        self.spoil_chain: Callable[[Any], None] | None = None
        """Shown the layers of each chain that has run."""
        self.slabs: list[tuple[int, int]] = []
        """Features that were dequantized, begin and count."""
        # Whose types are told, as to a function of ctypes.
        self.ql_cuda_plan_candidates = functools.partial(self._candidates)
        self.ql_cuda_complete_plan = functools.partial(lambda *_: Status.OK)
        self.ql_cuda_chain_length = functools.partial(self._chain_length)
        self.ql_status_text = functools.partial(lambda status: b"a status")

    def ql_cuda_linear(self, params: Any, launch: Any) -> int:
        plan = launch._obj.plan
        if plan and plan.contents.stages in (3, 6):
            return Status.BAD_PLAN
        status = int(self._cpu.ql_cpu_linear(params))
        if self._spoil is not None:
            self._spoil(params._obj)
        return status

    def ql_cuda_linear_chain(self, params: Any, plans: None, count: int, launch: Any) -> int:
        for one in params:
            status = int(self._cpu.ql_cpu_linear(ctypes.byref(one)))
            assert status == Status.OK
        if self.spoil_chain is not None:
            self.spoil_chain(params)
        return Status.OK

    @staticmethod
    def _chain_length(params: Any, count: int, device: Any) -> int:
        return count if params[0].m <= 16 else 0

    def ql_cuda_plan_linear(self, params: Any, device: Any, flags: int, plan: Any) -> int:
        plan._obj.token_blocks = plan._obj.warps_n = 1
        plan._obj.warps_k, plan._obj.stages, plan._obj.ctas = 2, 4, 132
        return Status.OK

    @staticmethod
    def _candidates(
        params: Any, device: Any, flags: int, room: int, plans: Any, times: Any, count: Any
    ) -> int:
        """Weigh a single plan, another than its own."""
        count.value = 1
        if room:
            plans[0] = CudaPlan(token_blocks=1, warps_n=2, warps_k=1, stages=2, ctas=132)
            times[0] = 1.0
        return Status.OK

    def ql_cuda_dequantize(
        self, params: Any, n_begin: int, n_count: int, dtype: int, out: int, launch: Any
    ) -> int:
        assert dtype == DType.F16
        made = torch.empty((n_count, params._obj.k))
        place = ctypes.c_int64(n_begin), ctypes.c_int64(n_count), ctypes.c_void_p(made.data_ptr())
        status = int(self._cpu.ql_cpu_dequantize(params, *place))
        half = made.half()
        ctypes.memmove(out, half.data_ptr(), 2 * half.numel())
        self.slabs.append((n_begin, n_count))
        return status

    def ql_cuda_read_probe(self, *arguments: Any) -> int:
        return Status.OK

    ql_cuda_empty = ql_cuda_read_probe

    def ql_cuda_read_variants(self) -> int:
        return 2

    def ql_cuda_kernel_name(self, kernel: int) -> bytes:
        return b"stand-in"

    def ql_cuda_error_text(self) -> bytes:
        return b"too many stages"


def stand_in_library(gpu: Gpu, spoil: Callable[[LinearParams], None] | None = None) -> Library:
    """Return the library as benchmarks know it, over `StandInFunctions`."""
    made = Library.__new__(Library)
    made.functions, made._gpu = StandInFunctions(spoil), gpu
    made.workspace = made._sink = torch.zeros(256, dtype=torch.uint8)
    made.device = CudaDevice(sm_count=132)
    return made
