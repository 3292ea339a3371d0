"""Plans of every kind give the same result: tiles, warps, rings, blocks, and other GPUs' plans.

Whether they are fast is another question; here no cut of the work may lose or repeat anything.
"""

import itertools

import pytest
import torch
from gpu.formats import ARRANGEMENTS, Kernel, described_device, kernels_of
from gpu.loading import RecordingKernels
from gpu.problems import FEW_FORMS, Form, Problem
from gpu.running import Call, plan_of

from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda_abi import CudaFlag, CudaPlan, Status
from qlinear_service.kernels.torch_types import to_torch

WARPS = ((1, 1), (1, 3), (1, 8), (1, 16), (2, 1), (2, 4), (2, 7), (4, 1), (4, 2), (4, 3), (8, 1),
         (8, 2))  # fmt: skip
"""Side by side along n, and sharing out k."""

OTHER_GPUS = (  # name, compute capability, multiprocessors, KiB of shared memory
    ("L4", 8, 9, 58, 99), ("A10", 8, 6, 72, 99), ("RTX A6000", 8, 6, 84, 99),
    ("A100", 8, 0, 108, 163), ("RTX 4090", 8, 9, 128, 99), ("H100 PCIe", 9, 0, 114, 227),
    ("GPU of one multiprocessor", 8, 6, 1, 99), ("half a GPU", 9, 0, 16, 227),
)  # fmt: skip


def tiles_of(kernels: RecordingKernels, form: Form) -> list[Kernel]:
    """Return one kernel for each tile that this GPU can multiply the form's layers by."""
    every = [kernel for kernel in kernels_of(kernels.library) if kernel.runs_on(kernels.info)]
    of_form = [kernel for kernel in every if kernel.takes(form.bits, form.group_size)
               and (not kernel.rounds or kernel.dtype is form.scale_dtype)]  # fmt: skip
    return list({kernel.tile: kernel for kernel in of_form}.values())


def results_of(kernel: Kernel) -> torch.dtype:
    """Return a dtype in which a kernel gives results, float32 if it can."""
    return to_torch(kernel.dtype) if kernel.rounds else torch.float32


@pytest.mark.parametrize("form", FEW_FORMS, ids=str)
def test_plans_of_every_kind(kernels: RecordingKernels, form: Form) -> None:
    """Those that this GPU has no registers or shared memory for are refused, the others right."""
    problem = Problem(kernels.device, 200, 1496, form)
    for kernel in tiles_of(kernels, form):
        x = problem.x(139, to_torch(kernel.dtype))
        exact = problem.product(x)
        rows = 8 * kernel.token_blocks
        ran: set[tuple[str, int]] = set()
        for place, (warps, stages) in enumerate(itertools.product(WARPS, (2, 3, 4, 8))):
            m = (3, rows, rows + 11)[place % 3]
            counts = [(1, 0), (2, 0), (3, 0), (7, 0), (24, 0), (48, 0), (58, 0), (72, 0), (84, 0),
                      (108, 0), (1, 1), (2, 1), (4, 1)]  # fmt: skip
            # Some counts of blocks in turn: over all of warps, stages and rows every one is met.
            for ctas, whole in (counts[(place + i) % len(counts)] for i in (0, 2, 4, 6, 9)):
                plan = kernel.plan(warps=warps, stages=stages, ctas=ctas, whole_tiles=whole)
                call = Call(kernels, problem, x[:m], results_of(kernel), plan=plan)
                status = call.run()
                if status != Status.BAD_PLAN:
                    call.check(exact[:m])
                    ran |= {("warps", WARPS.index(warps)), ("stages", stages)}
                    ran.add(("whole" if whole else "split", ctas))
        for name, least in (("warps", 2), ("stages", 2), ("whole", 2), ("split", 5)):
            assert len([1 for kind, _ in ran if kind == name]) >= least, (kernel.name, name, ran)


def test_more_blocks_than_can_run_at_once(kernels: RecordingKernels) -> None:
    """Nobody waits for a block that has not begun: a thousand blocks share one tile.

    Blocks of a cluster begin together; there are eight at most.
    """
    form = Form(group_size=32)
    problem = Problem(kernels.device, 32, 128 * 1000, form)
    for kernel in tiles_of(kernels, form):
        x = problem.x(5, to_torch(kernel.dtype))
        exact = problem.product(x)
        most = 0
        for warps, ctas in itertools.product(ARRANGEMENTS, (1, 2, 133, 250, 500, 1000)):
            plan = kernel.plan(warps=warps, stages=2, ctas=ctas, whole_tiles=0)
            call = Call(kernels, problem, x, results_of(kernel), plan=plan)
            if call.run() != Status.BAD_PLAN:  # for some there is too little scratch
                call.check(exact)
                most = max(most, plan.ctas)
        assert most >= (8 if kernel.marks else 133), kernel.name


@pytest.mark.parametrize("gpu", OTHER_GPUS, ids=lambda gpu: gpu[0])
def test_plans_for_other_gpus(
    kernels: RecordingKernels, gpu: tuple[str, int, int, int, int]
) -> None:
    """Made for less shared memory and other numbers of multiprocessors, and run here."""
    device = described_device(*gpu)
    for form, (n, k) in itertools.product(FEW_FORMS, ((520, 4096), (4096, 1024), (64, 11008))):
        problem = Problem(kernels.device, n, k, form)
        x = problem.x(130)
        exact = problem.product(x)
        for m, flags in itertools.product((1, 12, 30, 64, 130), (0, CudaFlag.BATCH_INVARIANT)):
            status, plan = plan_of(kernels, problem, m, device=device, flags=CudaFlag(flags))
            assert status == 0, kernels.library.ql_cuda_error_text()
            assert plan.shared_bytes <= device.shared_bytes_per_block
            assert plan.workspace_bytes <= kernels.library.ql_cuda_workspace_bytes()
            assert not (flags and not plan.whole_tiles)
            if plan.shared_bytes <= kernels.info.shared_bytes_per_block:
                Call(kernels, problem, x[:m], plan=plan, flags=CudaFlag(flags)).check(exact[:m])


def test_every_problem_has_a_plan(kernels: RecordingKernels) -> None:
    """Whatever the sizes: there is no shape without a tactic. Launches nothing."""
    sizes = (1, 7, 32, 63, 64, 65, 128, 576, 1408, 4096, 10944, 29568, 74240, 135168)
    devices = [None, *(described_device(*gpu) for gpu in OTHER_GPUS)]
    for form in FEW_FORMS:
        small = Problem(kernels.device, 64, 128, form)
        for k, n, m in itertools.product(sizes, sizes, (1, 9, 64, 65, 1000, 65536, 2_000_000)):
            params = kernels._params_of(small.layer)
            params = type(params).from_buffer_copy(params)
            params.m, params.n, params.k = m, n, k
            params.x_dtype = params.y_dtype = DType.F16
            params.x_row_stride, params.y_row_stride = k, n
            plan = CudaPlan()
            for device in devices:
                described_as = device or kernels.info
                status = kernels.library.ql_cuda_plan_linear(params, described_as, 0, plan)
                assert status == 0, (m, n, k, form, described_as.name)
                assert plan.workspace_bytes <= kernels.library.ql_cuda_workspace_bytes()
                assert plan.shared_bytes <= described_as.shared_bytes_per_block


def test_a_plan_is_a_pure_function(kernels: RecordingKernels) -> None:
    problem = Problem(kernels.device, 520, 4096)
    first = plan_of(kernels, problem, 17)[1]
    for _ in range(5):
        plan_of(kernels, problem, 400, DType.BF16)
        assert bytes(plan_of(kernels, problem, 17)[1]) == bytes(first)


def test_float32_scales_and_zero_points_still_fit_the_smallest_gpu(
    kernels: RecordingKernels,
) -> None:
    """99 KiB of shared memory, the largest step of all formats, every number of rows."""
    device = described_device(*OTHER_GPUS[1])
    form = Form(bits=8, group_size=32, symmetric=False, scale_dtype=DType.F32)
    problem = Problem(kernels.device, 4096, 4096, form)
    for m in range(1, 200):
        for flags in (CudaFlag.NONE, CudaFlag.BATCH_INVARIANT):
            status, plan = plan_of(kernels, problem, m, device=device, flags=flags)
            assert status == 0
            assert plan.shared_bytes <= 99 * 1024
            assert plan.stages >= 2


def test_launching_with_no_plan_takes_the_planners(kernels: RecordingKernels) -> None:
    problem = Problem(kernels.device, 300, 4096)
    x = problem.normal_x(9)
    _, plan = plan_of(kernels, problem, 9)
    calls = [Call(kernels, problem, x, plan=given) for given in (None, plan)]
    assert [call.run() for call in calls] == [0, 0]
    assert torch.equal(calls[0].y, calls[1].y)
