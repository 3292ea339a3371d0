"""Our kernels in the kernel benchmark: the library through its C interface, as a contestant.

Knows the ABI. Everything runs on the stream of `Gpu`.
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from kernel_figures import Cell, copies_for, weight_bytes
from kernel_gpu import Call, Gpu
from kernel_journal import CONTEXT_LOST, Journal, one_line
from kernel_layers import Prepared, checked, random_copies

from qlinear_service.dtypes import DType
from qlinear_service.kernels import cuda_abi
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda_abi import CudaDevice, CudaFlag, CudaLaunch, CudaPlan, Status
from qlinear_service.kernels.planner import Planner
from qlinear_service.kernels.tuned_plans import TunedPlans
from qlinear_service.kernels.tuned_table import Table

SINK_BYTES = 256


class LibraryError(Exception):
    """The library refused, or is not the one that this checkout describes.

    Args:
        text: what it said.
        status: what it returned, if it did.
    """

    def __init__(self, text: str, status: int = Status.OK) -> None:
        super().__init__(text)
        self.status = status


class Library:
    """The CUDA library, one device, one workspace.

    Raises:
        LibraryError: it cannot be loaded, is another version's, or holds no code for this GPU.
    """

    def __init__(self, path: Path, gpu: Gpu) -> None:
        try:
            self.functions = cuda_abi.declare(ctypes.CDLL(str(path)))
        except (OSError, AttributeError) as error:
            raise LibraryError(f"cannot load {path}: {error}") from error
        found, expected = cuda_abi.sizes(self.functions), cuda_abi.expected_sizes()
        if found != expected:
            raise LibraryError(f"{path} has layout version and sizes {found}, not {expected}")
        self.device = CudaDevice()
        self.check(
            self.functions.ql_cuda_device_info(gpu.device.index, ctypes.byref(self.device)),
            "device_info",
        )
        if not self.device.supported:
            have = self.functions.ql_cuda_architectures().decode()
            raise LibraryError(f"{path} holds code for {have}, not for {gpu.device}")
        self._gpu = gpu
        size = self.functions.ql_cuda_workspace_bytes()
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=gpu.device)
        self._sink = torch.zeros(SINK_BYTES, dtype=torch.uint8, device=gpu.device)

    def check(self, status: int, operation: str) -> None:
        """Raise unless a function returned OK."""
        if status != Status.OK:
            text = self.functions.ql_status_text(status).decode()
            if status in (Status.CUDA_ERROR, Status.BAD_PLAN):
                text = self.functions.ql_cuda_error_text().decode()
            raise LibraryError(f"{operation}: {text} (status {status})", status)

    def launch(self, flags: CudaFlag, plan: CudaPlan | None = None) -> CudaLaunch:
        """Return where and how launches run."""
        return CudaLaunch(
            device=self._gpu.device.index,
            flags=int(flags),
            stream=self._gpu.stream.cuda_stream,
            workspace=self.workspace.data_ptr(),
            workspace_bytes=self.workspace.numel(),
            plan=None if plan is None else ctypes.pointer(plan),
        )

    def plan(
        self, params: LinearParams, flags: CudaFlag, device: CudaDevice | None = None
    ) -> CudaPlan:
        """Return the library's own plan, for this GPU or another `device`."""
        plan = CudaPlan()
        pointers = (ctypes.byref(params), ctypes.byref(device or self.device))
        status = self.functions.ql_cuda_plan_linear(*pointers, int(flags), ctypes.byref(plan))
        self.check(status, "plan")
        return plan

    def kernel_name(self, plan: CudaPlan) -> str:
        """Return the name of the kernel that a plan runs."""
        name = self.functions.ql_cuda_kernel_name(plan.kernel)
        return name.decode() if name else ""

    def linear(self, params: LinearParams, launch: CudaLaunch) -> Call:
        """Return the call of one product."""

        def call() -> None:
            status = self.functions.ql_cuda_linear(ctypes.byref(params), ctypes.byref(launch))
            if status != Status.OK:
                self.check(status, "linear")

        return call

    def dequantize(
        self, params: LinearParams, n_begin: int, n_count: int, dtype: DType, out: torch.Tensor
    ) -> Call:
        """Return the call that writes some features' weights to `out`, [n_count, k] of dtype."""
        launch, to = self.launch(CudaFlag.NONE), out.data_ptr()

        def call() -> None:
            status = self.functions.ql_cuda_dequantize(
                ctypes.byref(params), n_begin, n_count, dtype, to, ctypes.byref(launch)
            )
            self.check(status, "dequantize")

        return call

    def read_probe(self, buffer: torch.Tensor, variant: int) -> Call:
        """Return the call that reads `buffer` once."""
        launch, size = self.launch(CudaFlag.NONE), buffer.numel()
        start, sink = buffer.data_ptr(), self._sink.data_ptr()

        def call() -> None:
            self.check(
                self.functions.ql_cuda_read_probe(start, size, variant, sink, ctypes.byref(launch)),
                "read_probe",
            )

        return call

    def empty(self) -> Call:
        """Return the call of an empty kernel."""
        launch = self.launch(CudaFlag.NONE)
        return lambda: self.check(self.functions.ql_cuda_empty(ctypes.byref(launch)), "empty")

    def reset(self) -> None:
        """Make the workspace usable again after a launch that failed."""
        self.workspace.zero_()


def note_failure(journal: Journal, gpu: Gpu, library: Library, key: str, error: Exception) -> str:
    """Note a failure and return it in one line; leaves if the GPU does not answer any more."""
    text = one_line(error)
    journal.fail(key, text)
    if gpu.is_lost():
        sys.stderr.flush()
        os._exit(CONTEXT_LOST)  # no farewell to a GPU that does not answer
    library.reset()
    return text


class Ours:
    """Our kernel as a contestant, with a table's plan, the library's own or a given one."""

    def __init__(
        self,
        gpu: Gpu,
        library: Library,
        name: str = "qlinear",
        flags: CudaFlag = CudaFlag.NONE,
        tables: Sequence[Table] = (),
        planned_for: CudaDevice | None = None,
    ) -> None:
        self.name = name
        self.flags = flags
        self._planned_for = planned_for
        self._tuned = None
        if tables:
            self._tuned = TunedPlans(tables, Planner(library.functions), library.device, flags)
        self._gpu, self.library = gpu, library

    def weighed(self, params: LinearParams) -> list[CudaPlan]:
        """Return the plans that the planner weighs for a problem."""
        found = Planner(self.library.functions).candidates(params, self.library.device, self.flags)
        return [candidate.plan for candidate in found]

    def prepare(
        self, cell: Cell, x: torch.Tensor, y: torch.Tensor, plan: CudaPlan | None = None
    ) -> Prepared:
        """Return its calls in a cell, after checking the first and the last of them.

        Raises:
            LibraryError: the library refused the problem or the plan.
        """
        count = copies_for(weight_bytes(cell.shape, cell.variant).total)
        copies = random_copies(self._gpu, cell.shape, cell.variant, count)
        params = [copy.params(x, y) for copy in copies]
        given, plan = plan, plan or self._given(params[0])
        launch = self.library.launch(self.flags, plan)
        calls = [self.library.linear(one, launch) for one in params]
        errors, wrongs = [], []
        for copy, call in ((copies[0], calls[0]), (copies[-1], calls[-1])):
            error, wrong = checked(cell, x, y, copy, call)
            errors.append(error)
            wrongs.append(wrong)
        detail: dict[str, Any] = {}
        if given is None:
            used = plan or self.library.plan(params[0], self.flags)
            detail = {"plan": plan_values(used), "kernel": self.library.kernel_name(used)}
        return Prepared(calls, max(errors), max(wrongs), detail)

    def _given(self, params: LinearParams) -> CudaPlan | None:
        """Return a table's plan, as servers look it up, or that for another GPU; None: neither."""
        if self._planned_for is not None:
            return self.library.plan(params, self.flags, self._planned_for)
        plans = None if self._tuned is None else self._tuned.of(params)
        return None if plans is None else plans.plan(params)


def plan_values(plan: CudaPlan) -> dict[str, int]:
    """Return the fields of a plan."""
    return {name: getattr(plan, name) for name, *_ in plan._fields_}
