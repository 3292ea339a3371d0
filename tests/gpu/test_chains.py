"""Several layers in one call, launched to overlap: every bit as if each had been called alone."""

import ctypes
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.problems import Form, Problem, assert_same
from gpu.running import plan_of

from qlinear_service.dtypes import DType
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda_abi import CudaFlag, CudaLaunch, CudaPlan, Status
from qlinear_service.kernels.torch_types import from_torch

ROWS = (1, 8, 16, 30, 64, 100)
BLOCK = ((4096, 1536), (1024, 4096), (4096, 7168), (3584, 4096))  # (k, n), as in a block of a Llama


class Chain:
    """Problems one after the other, each reading the first columns of what the last one wrote."""

    def __init__(
        self, kernels: RecordingKernels, problems: Sequence[Problem], x: torch.Tensor
    ) -> None:
        self.kernels, self.problems, self.x = kernels, problems, x
        self.ys: list[torch.Tensor] = []
        self.params = (LinearParams * len(problems))()
        source = x
        for params, problem in zip(self.params, problems, strict=True):
            y = torch.empty((len(x), problem.logical.spec.n), dtype=x.dtype, device=x.device)
            ctypes.pointer(params)[0] = kernels._params_of(problem.layer)
            params.x, params.y, params.m = source.data_ptr(), y.data_ptr(), len(x)
            params.x_row_stride, params.y_row_stride = source.stride(0), y.stride(0)
            params.x_dtype = params.y_dtype = from_torch(x.dtype)
            self.ys.append(y)
            source = y
        size = kernels.library.ql_cuda_workspace_bytes()
        self.workspace = torch.zeros(size, dtype=torch.uint8, device=x.device)

    def launch(self, flags: CudaFlag = CudaFlag.NONE) -> CudaLaunch:
        """Return where and how it runs."""
        return CudaLaunch(
            device=self.x.device.index or 0,
            flags=flags,
            stream=torch.cuda.current_stream(self.x.device).cuda_stream,
            workspace=self.workspace.data_ptr(),
            workspace_bytes=self.workspace.numel(),
        )

    def call(self, flags: CudaFlag = CudaFlag.NONE) -> int:
        """Run all in one call."""
        library, count = self.kernels.library, len(self.params)
        return int(library.ql_cuda_linear_chain(self.params, None, count, self.launch(flags)))

    def one_by_one(self) -> list[torch.Tensor]:
        """Return what separate calls write, each after the end of the one before."""
        for params in self.params:
            assert self.kernels.library.ql_cuda_linear(params, self.launch()) == 0
            torch.cuda.synchronize()
        return [y.clone() for y in self.ys]

    def spoil(self) -> None:
        """Fill all results with NaN."""
        for y in self.ys:
            y.fill_(math.nan)


def block_of(kernels: RecordingKernels, form: Form) -> list[Problem]:
    return [Problem(kernels.device, n, k, form, exact=False) for k, n in BLOCK]


def small_x(problems: Sequence[Problem], m: int) -> torch.Tensor:
    """Return activations whose products stay finite through the chain."""
    return (problems[0].normal_x(m) / 64).half()


@pytest.mark.parametrize(
    "form", [Form(), Form(bits=8, symmetric=False), Form(group_size=32)], ids=str
)
@pytest.mark.parametrize("flags", [CudaFlag.NONE, CudaFlag.DEPENDENT], ids=str)
def test_each_layer_reads_what_the_one_before_wrote(
    kernels: RecordingKernels, form: Form, flags: CudaFlag
) -> None:
    problems = block_of(kernels, form)
    for m in ROWS:
        chain = Chain(kernels, problems, small_x(problems, m))
        expected = chain.one_by_one()
        assert all(y.isfinite().all() for y in expected)
        for _ in range(20):
            chain.spoil()
            assert chain.call(flags) == 0, kernels.library.ql_cuda_error_text()
            for y, right in zip(chain.ys, expected, strict=True):
                assert_same(y, right)


def test_many_layers_on_one_x(kernels: RecordingKernels) -> None:
    """A hundred small launches, each started before the one in front has ended."""
    problems = [Problem(kernels.device, n, 512, exact=False) for n in (64, 200, 1000, 520)] * 25
    x = problems[0].normal_x(7)
    chain = Chain(kernels, problems, x)
    for params in chain.params:
        params.x, params.x_row_stride = x.data_ptr(), x.stride(0)
    expected = chain.one_by_one()
    for _ in range(20):
        chain.spoil()
        assert chain.call() == 0
        assert all(torch.equal(y, right) for y, right in zip(chain.ys, expected, strict=True))


def recorded(chain: Chain) -> tuple[ctypes.c_void_p, Callable[[], None]]:
    """Return a chain that was recorded on a stream of its own, and what frees it."""
    library, handle = chain.kernels.library, ctypes.c_void_p()
    with torch.cuda.stream(torch.cuda.Stream(chain.x.device)):
        launch = chain.launch()
        status = library.ql_cuda_record_chain(
            chain.params, None, len(chain.params), launch, ctypes.byref(handle)
        )
    assert status == 0, library.ql_cuda_error_text()
    return handle, lambda: library.ql_cuda_free_chain(handle)


@pytest.mark.parametrize("m", ROWS)
def test_a_recorded_chain_is_launched_as_often_as_wanted(kernels: RecordingKernels, m: int) -> None:
    problems = block_of(kernels, Form())
    chain = Chain(kernels, problems, small_x(problems, m))
    handle, free = recorded(chain)
    for turn in range(30):
        if turn % 10 == 0:
            chain.x.copy_(small_x(problems, m))
            expected = chain.one_by_one()
        chain.spoil()
        assert kernels.library.ql_cuda_launch_chain(handle, chain.launch()) == 0
        for y, right in zip(chain.ys, expected, strict=True):
            assert_same(y, right)
    torch.cuda.synchronize()
    free()


def test_events_are_recorded_around_all(kernels: RecordingKernels) -> None:
    problems = block_of(kernels, Form())
    chain = Chain(kernels, problems, small_x(problems, 1))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for event in events:
        event.record()
    launch = chain.launch()
    launch.start_event, launch.stop_event = (event.cuda_event for event in events)
    assert chain.call() == 0
    torch.cuda.synchronize()
    library = kernels.library
    assert library.ql_cuda_linear_chain(chain.params, None, len(chain.params), launch) == 0
    torch.cuda.synchronize()
    assert 1e-3 < events[0].elapsed_time(events[1]) < 10


def test_plans_are_each_layers_own(kernels: RecordingKernels) -> None:
    problems = block_of(kernels, Form())
    chain = Chain(kernels, problems, small_x(problems, 9))
    plans = []
    for problem in problems:
        status, plan = plan_of(kernels, problem, 9, flags=CudaFlag.BATCH_INVARIANT)
        assert status == 0
        plans.append(plan)
    pointers = (ctypes.POINTER(CudaPlan) * len(plans))(*map(ctypes.pointer, plans))
    expected = []
    for params, plan in zip(chain.params, plans, strict=True):
        launch = chain.launch()
        launch.plan = ctypes.pointer(plan)
        assert kernels.library.ql_cuda_linear(params, launch) == 0
    expected = [y.clone() for y in chain.ys]
    chain.spoil()
    library, count = kernels.library, len(plans)
    assert library.ql_cuda_linear_chain(chain.params, pointers, count, chain.launch()) == 0
    for y, right in zip(chain.ys, expected, strict=True):
        assert_same(y, right)


def test_what_cannot_be_a_chain_is_refused(kernels: RecordingKernels) -> None:
    problems = block_of(kernels, Form())
    chain = Chain(kernels, problems, small_x(problems, 2))
    library, handle = kernels.library, ctypes.c_void_p()
    for count in (0, -1, 257):
        status = library.ql_cuda_linear_chain(chain.params, None, count, chain.launch())
        assert status == Status.BAD_SHAPE
    assert library.ql_cuda_linear_chain(None, None, 1, chain.launch()) == Status.NULL_POINTER
    assert library.ql_cuda_launch_chain(None, chain.launch()) == Status.NULL_POINTER
    launch = chain.launch()
    launch.plan = ctypes.pointer(plan_of(kernels, problems[0], 2)[1])
    assert library.ql_cuda_linear_chain(chain.params, None, 4, launch) == Status.BAD_PLAN
    library.ql_cuda_free_chain(None)
    # A layer that cannot be launched ends the recording, too: the stream works on.
    expected = chain.one_by_one()
    torch.cuda.synchronize()  # another stream writes there next
    chain.params[2].bits = 5
    with torch.cuda.stream(torch.cuda.Stream(kernels.device)):
        status = library.ql_cuda_record_chain(
            chain.params, None, 4, chain.launch(), ctypes.byref(handle)
        )
        assert status == Status.BAD_BITS
        assert not handle
        chain.params[2].bits = 4
        chain.spoil()
        torch.cuda.synchronize()
        assert chain.call() == 0
        torch.cuda.synchronize()
    for y, right in zip(chain.ys, expected, strict=True):
        assert_same(y, right)


def test_rows_of_other_dtypes(kernels: RecordingKernels) -> None:
    """bfloat16 through all layers."""
    problems = block_of(kernels, Form(symmetric=False))
    chain = Chain(kernels, problems, small_x(problems, 5).bfloat16())
    expected = chain.one_by_one()
    chain.spoil()
    assert chain.call() == 0
    for y, right in zip(chain.ys, expected, strict=True):
        assert_same(y, right)
    assert chain.params[0].x_dtype == DType.BF16
