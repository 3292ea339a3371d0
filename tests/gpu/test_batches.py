"""A row and its company: bitwise the same in batch-invariant mode, within rounding otherwise."""

import pytest
import torch
from gpu.bounds import assert_near, norms
from gpu.loading import RecordingKernels
from gpu.problems import FEW_FORMS, Form, Problem, assert_same
from gpu.running import plan_of

from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda_abi import CudaFlag

BATCHES = (2, 7, 8, 9, 16, 17, 31, 33, 64, 65, 127, 200, 256, 1000)
SHAPES = ((4096, 4096), (11008, 520), (1000, 8200), (128, 64), (1003, 520))


@pytest.mark.parametrize("form", FEW_FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_invariant_rows_are_bitwise_the_same_in_any_batch(
    invariant: RecordingKernels, form: Form, shape: tuple[int, int]
) -> None:
    k, n = shape
    problem = Problem(invariant.device, n, k, form, exact=False)
    for dtype in (torch.float16, torch.bfloat16):
        x = problem.normal_x(BATCHES[-1], dtype)
        rows = (0, 1, 5, 7, 8, 15, 16, 30, 63, 64, 126, 199, 255, 999)
        alone = {row: invariant.linear(problem.layer, x[row : row + 1], DType.F32) for row in rows}
        for m in BATCHES:
            together = invariant.linear(problem.layer, x[:m], DType.F32)
            for row in rows:
                if row < m:
                    assert_same(together[row : row + 1], alone[row])


def test_invariant_rows_do_not_depend_on_their_place(invariant: RecordingKernels) -> None:
    problem = Problem(invariant.device, 1000, 4096, exact=False)
    x = problem.normal_x(150)
    y = invariant.linear(problem.layer, x, DType.F16)
    for seed in range(5):
        order = torch.randperm(150, generator=torch.Generator().manual_seed(seed))
        order = order.to(invariant.device)
        assert_same(invariant.linear(problem.layer, x[order], DType.F16), y[order])


def test_invariant_plans_split_no_tile_and_cut_k_alike(invariant: RecordingKernels) -> None:
    problem = Problem(invariant.device, 520, 11008)
    cuts = set()
    for m in (1, *BATCHES):
        status, plan = plan_of(invariant, problem, m, flags=CudaFlag.BATCH_INVARIANT)
        assert status == 0
        assert plan.whole_tiles
        cuts.add(plan.warps_k)
    assert len(cuts) == 1


def test_rows_are_the_same_within_rounding_by_default(kernels: RecordingKernels) -> None:
    for k, n in SHAPES:
        problem = Problem(kernels.device, n, k, exact=False)
        x = problem.normal_x(200)
        exact, norm = problem.product(x), norms(problem, x)
        for m in BATCHES[:-2]:
            y = kernels.linear(problem.layer, x[:m], DType.F16)
            assert_near(kernels, problem, x[:m], y, exact[:m], norm[:m])
            order = torch.randperm(m, device=kernels.device)
            moved = kernels.linear(problem.layer, x[order], DType.F16)
            assert_near(kernels, problem, x[order], moved, exact[order], norm[order])


def test_invariant_results_are_right(invariant: RecordingKernels) -> None:
    for form in FEW_FORMS:
        problem = Problem(invariant.device, 300, 2000, form, exact=False)
        x = problem.normal_x(90)
        exact, norm = problem.product(x), norms(problem, x)
        for m in (1, 12, 90):
            y = invariant.linear(problem.layer, x[:m], DType.F16)
            assert_near(invariant, problem, x[:m], y, exact[:m], norm[:m])
