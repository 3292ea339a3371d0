"""Kernels that round weights to 16 bits: where they may, and that they round nothing else."""

import pytest
import torch
from gpu.bounds import HALF_UNIT, SHARES, norms, rounds_weights
from gpu.loading import RecordingKernels
from gpu.problems import Form, Problem
from gpu.running import check

from qlinear_service.dtypes import DType
from qlinear_service.kernels import packing

DTYPES = ((torch.float16, DType.F16), (torch.bfloat16, DType.BF16))


@pytest.mark.parametrize(("dtype", "scale_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_results_are_those_of_rounded_weights(
    kernels: RecordingKernels, dtype: torch.dtype, scale_dtype: DType, group_size: int, bits: int
) -> None:
    form = Form(bits=bits, group_size=group_size, symmetric=False, scale_dtype=scale_dtype)
    problem = Problem(kernels.device, 4104, 2112, form, exact=False)
    x = problem.normal_x(1030, dtype)
    weights = torch.cat([problem.weights(b, e) for b, e in problem.slabs()])
    exact = x.double() @ weights.float().to(dtype).double().T
    norm = norms(problem, x)
    spec = problem.logical.spec
    rounding = [m for m in (40, 500, 1000, 1030)
                if rounds_weights(kernels, problem, m, scale_dtype, scale_dtype)]  # fmt: skip
    assert rounding or kernels.info.major != 9
    for m in rounding:
        y = kernels.linear(problem.layer, x[:m], scale_dtype)
        bound = (spec.k_padded / 16 + SHARES) * 2.0**-22 * 4 * norm[:m] + 2.0**-25
        bound += HALF_UNIT[dtype] * exact[:m].abs()
        assert ((y.double() - exact[:m]).abs() <= bound).all()


def test_results_in_float32_and_scales_of_another_dtype_are_not_rounded(
    kernels: RecordingKernels,
) -> None:
    problem = Problem(kernels.device, 4096, 4096)
    assert not rounds_weights(kernels, problem, 500, DType.F16, DType.F32)
    assert not rounds_weights(kernels, problem, 500, DType.BF16, DType.BF16)
    if kernels.info.major == 9:
        assert rounds_weights(kernels, problem, 500, DType.F16, DType.F16)
    finer = Problem(kernels.device, 4096, 4096, Form(scale_dtype=DType.BF16))
    assert not rounds_weights(kernels, finer, 500, DType.BF16, DType.F16)


def test_weights_that_float16_cannot_hold_are_not_rounded(kernels: RecordingKernels) -> None:
    """8192 times 15 is infinite in float16; the results are small."""
    problem = Problem(kernels.device, 256, 256)
    problem.logical.scales.fill_(8192.0)
    with kernels.device:
        problem.layer = packing.pack(problem.logical)
    x = problem.x(200) * 2.0**-10
    exact = problem.product(x)
    assert exact.abs().max() < 65504
    assert not rounds_weights(kernels, problem, 200, DType.F16, DType.F16)
    check(kernels, problem, x, exact, torch.float16)
