"""Calls of the kernels: simple ones, and raw ones with plans, guards and poison around memory."""

import ctypes
import math

import torch
from gpu.problems import Problem, assert_same

from qlinear_service.dtypes import DType
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.kernels.cuda_abi import CudaFlag, CudaLaunch, CudaPlan, Status
from qlinear_service.kernels.torch_types import from_torch

GUARD_BYTES = 4096
GUARD = 0xA5
COUNTER_BYTES = 1024 * 1024
"""What a workspace begins with: kCounterBytes of csrc/partition.h."""

STEP_K = 128
"""Input features that no cut divides: kStepK of csrc/partition.h."""


def rounded(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the right y for the exact one: float32 holds it, so that it is rounded once."""
    return exact.float().to(dtype)


def check(
    kernels: CudaKernels,
    problem: Problem,
    x: torch.Tensor,
    exact: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compute into memory full of NaN and compare every element.

    Where another kernel would give 16-bit results, these are compared, too.
    """
    y = torch.full((len(x), problem.logical.spec.n), math.nan, dtype=dtype, device=problem.device)
    kernels.linear(problem.layer, x, from_torch(dtype), out=y)
    try:
        assert_same(y, rounded(exact, dtype))
    except AssertionError as error:
        plan = kernels.plan(problem.layer, len(x), from_torch(x.dtype), from_torch(dtype))
        shape = f"m={len(x)} {problem.logical.spec.shape} {problem.form} {x.dtype}"
        raise AssertionError(f"{shape}, {described(plan)}: {error}") from None
    if dtype == torch.float32 and x.dtype != torch.float32:
        plans = [kernels.plan(problem.layer, len(x), from_torch(x.dtype), from_torch(y_dtype))
                 for y_dtype in (dtype, x.dtype)]  # fmt: skip
        if plans[0].kernel != plans[1].kernel:
            check(kernels, problem, x, exact, x.dtype)


def described(plan: CudaPlan) -> str:
    """Return a plan's numbers for messages."""
    return " ".join(f"{name}={getattr(plan, name)}" for name, _ in plan._fields_)


def apart(x: torch.Tensor, *, stride: int, offset: int = 0) -> torch.Tensor:
    """Return x with `stride` elements from row to row, `offset` into memory, NaN all around."""
    m, k = x.shape
    room = torch.full((offset + m * stride + 64,), math.nan, dtype=x.dtype, device=x.device)
    rows = room[offset:].as_strided((m, k), (stride, 1))
    rows.copy_(x)
    return rows


class Guarded:
    """Memory with guards before and after it."""

    def __init__(self, nbytes: int, device: torch.device, *, fill: int = 0) -> None:
        room = torch.full((nbytes + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device=device)
        self._front, self.bytes, self._back = room.split((GUARD_BYTES, nbytes, GUARD_BYTES))
        self.bytes.fill_(fill)

    def assert_intact(self, name: str) -> None:
        """Fail if something was written before or after it."""
        for part, where in ((self._front, "before"), (self._back, "after")):
            wrong = (part != GUARD).nonzero()
            assert not len(wrong), f"{len(wrong)} bytes {where} {name} written, first {wrong[0]}"


class Call:
    """One raw call of ql_cuda_linear, whose every field a test may change.

    The workspace is exactly as large as the plan needs, its counters zero and its scratch NaN; y
    is full of NaN; both have guards.
    """

    def __init__(
        self,
        kernels: CudaKernels,
        problem: Problem,
        x: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        *,
        plan: CudaPlan | None = None,
        flags: CudaFlag = CudaFlag.NONE,
        y_stride: int = 0,
    ) -> None:
        self.kernels, self.problem, self.x = kernels, problem, x
        self.plan = plan
        n, m = problem.logical.spec.n, len(x)
        self.params = LinearParams.from_buffer_copy(kernels._params_of(problem.layer))
        self.params.x, self.params.m, self.params.x_row_stride = x.data_ptr(), m, x.stride(0)
        self.params.x_dtype, self.params.y_dtype = from_torch(x.dtype), from_torch(dtype)
        stride = y_stride or n
        self._y = Guarded(m * stride * dtype.itemsize, problem.device)
        flat = self._y.bytes.view(dtype).fill_(math.nan)
        self._y_rows = flat.view(m, stride)
        self.y = self._y_rows[:, :n]
        self.params.y, self.params.y_row_stride = self.y.data_ptr(), stride
        self.launch = CudaLaunch(device=kernels.device.index or 0, flags=flags)
        self.use_workspace(kernels.library.ql_cuda_workspace_bytes())

    def use_workspace(self, nbytes: int) -> None:
        """Take a new workspace of `nbytes`, counters zero, scratch NaN."""
        self.workspace = Guarded(nbytes, self.problem.device, fill=0xFF)
        self.counters.zero_()
        self.launch.workspace = self.workspace.bytes.data_ptr()
        self.launch.workspace_bytes = nbytes

    @property
    def counters(self) -> torch.Tensor:
        return self.workspace.bytes[:COUNTER_BYTES]

    def needed_bytes(self) -> int:
        """Return the smallest workspace that the call does not refuse; 0 where it needs none."""
        whole = self.launch.workspace_bytes
        low, high = 0, whole
        while low < high:
            self.launch.workspace_bytes = (low + high) // 2
            if self.run() == Status.WORKSPACE:
                low = self.launch.workspace_bytes + 1
            else:
                high = self.launch.workspace_bytes
        self.launch.workspace_bytes = whole
        return low

    def run(self) -> int:
        """Launch on torch's current stream and return the status."""
        self.launch.stream = torch.cuda.current_stream(self.kernels.device).cuda_stream
        if self.plan is not None:
            self.launch.plan = ctypes.pointer(self.plan)
        return int(self.kernels.library.ql_cuda_linear(self.params, self.launch))

    def check(self, exact: torch.Tensor) -> None:
        """Run and look at everything that the call may have touched."""
        status = self.run()
        text = self.kernels.library.ql_cuda_error_text().decode()
        assert status == 0, f"status {status}: {text}"
        assert_same(self.y.contiguous(), rounded(exact, self.y.dtype))
        self._y.assert_intact("y")
        self.workspace.assert_intact("the workspace")
        assert self._y_rows[:, self.y.shape[1] :].isnan().all(), "written between rows of y"
        assert not self.counters.any(), "counters are left behind"


def split_plan(kernels: CudaKernels, problem: Problem, x: torch.Tensor) -> CudaPlan:
    """Return a plan of the form that every GPU has, changed so that thread blocks share tiles."""
    older = type(kernels.info).from_buffer_copy(kernels.info)
    older.major = 8
    status, plan = plan_of(kernels, problem, len(x), from_torch(x.dtype), device=older)
    assert status == 0, kernels.library.ql_cuda_error_text()
    tiles, steps = plan.m_tiles * plan.n_tiles, problem.logical.spec.k_padded // STEP_K
    # Neither a multiple nor a divisor of the tiles; more would need too much scratch.
    plan.whole_tiles, plan.ctas = 0, min(tiles * steps, tiles + tiles // 2 + 1, 131)
    return plan


def plan_of(
    kernels: CudaKernels,
    problem: Problem,
    m: int,
    dtype: DType = DType.F16,
    *,
    device: object = None,
    flags: CudaFlag = CudaFlag.NONE,
) -> tuple[int, CudaPlan]:
    """Return the status and the plan for a device of any description, by default this one."""
    params = LinearParams.from_buffer_copy(kernels._params_of(problem.layer))
    params.m, params.x_dtype, params.y_dtype = m, dtype, DType.F32
    params.x_row_stride, params.y_row_stride = params.k, params.n
    plan = CudaPlan()
    described_as = kernels.info if device is None else device
    return int(kernels.library.ql_cuda_plan_linear(params, described_as, flags, plan)), plan
