"""Every code, scale and zero point comes out of the kernels exactly as it went in.

A one-hot row of x picks one input feature, so that y is the decoded weight itself.
"""

import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.problems import DTYPES, FORMS, Form, Problem, assert_same
from gpu.running import check

from qlinear_service.dtypes import DType
from qlinear_service.kernels.torch_types import to_torch

N, K = 80, 200  # neither is a multiple of its padding
ROWS = (8, 16, 32, 64, K)
"""Each kernel by its height, and several tiles of the highest."""


def with_scales(form: Form, dtype: DType) -> Form:
    return Form(
        bits=form.bits, group_size=form.group_size, symmetric=form.symmetric, scale_dtype=dtype
    )


def one_hot(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.eye(K, device=device).to(dtype)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_hot_rows_decode_every_weight(kernels: RecordingKernels, form: Form) -> None:
    for scale_dtype in DType:
        problem = Problem(kernels.device, N, K, with_scales(form, scale_dtype))
        weights = problem.weights(0, N).T
        for dtype in DTYPES:
            x = one_hot(dtype, kernels.device)
            for rows in ROWS:
                for begin in range(0, K, rows):
                    end = min(begin + rows, K)
                    check(kernels, problem, x[begin:end], weights[begin:end])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_decoded_weights_in_every_output_dtype(kernels: RecordingKernels, form: Form) -> None:
    """Differences have at most eight significant bits, which bfloat16 holds, too."""
    problem = Problem(kernels.device, N, K, form, seed=1)
    weights = problem.weights(0, N).T
    for dtype in DTYPES:
        for x_dtype in DTYPES:
            check(kernels, problem, one_hot(x_dtype, kernels.device), weights, dtype)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_scales_of_every_value_are_applied_once(kernels: RecordingKernels, form: Form) -> None:
    """A float16 or bfloat16 scale times a code is exact in float32, a float32 one rounds once."""
    for scale_dtype in DType:
        problem = Problem(kernels.device, N, K, with_scales(form, scale_dtype), exact=False)
        weights = problem.weights(0, N).T
        for dtype in (torch.float16, torch.bfloat16):
            for rows in (1, 40, K):
                check(kernels, problem, one_hot(dtype, kernels.device)[-rows:], weights[-rows:])


def test_zero_points_and_codes_meet_in_all_pairs() -> None:
    """What the tests above rely on: no pair of a code and a zero point is missing."""
    for form in FORMS:
        if form.symmetric:
            continue
        logical = Problem(torch.device("cpu"), N, K, form).logical
        assert logical.zeros is not None
        zeros = logical.zeros.repeat_interleave(K if form.group_size == -1 else form.group_size, 0)
        pairs = (
            torch.stack((logical.codes.long(), zeros[:K].long()), dim=2).view(-1, 2).unique(dim=0)
        )
        assert len(pairs) >= 0.9 * 6 * 2**form.bits, form


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_dequantize_gives_the_weights(kernels: RecordingKernels, form: Form) -> None:
    for scale_dtype in DType:
        problem = Problem(kernels.device, 100, K, with_scales(form, scale_dtype), exact=False)
        exact = problem.weights(0, 100)
        for dtype in DType:
            weights = kernels.dequantize(problem.layer, dtype, begin=16, end=100)
            # Formed in float32, which is exact for 16-bit scales, and rounded to the output.
            assert_same(weights, exact[16:].float().to(to_torch(dtype)))


def test_the_gather_is_indexing(kernels: RecordingKernels) -> None:
    for dtype in DTYPES:
        for m, k, stride in ((1, 1, 1), (3, 77, 80), (17, 1000, 1001), (300, 4096, 4096)):
            x = torch.randn(m, stride, device=kernels.device).to(dtype)[:, :k]
            order = torch.randperm(k, device=kernels.device).int()
            assert torch.equal(kernels.gather(x, order), x[:, order.long()])


def test_act_order_layers_see_their_own_columns(kernels: RecordingKernels) -> None:
    for group_size in (-1, 32, 128):
        problem = Problem(kernels.device, 96, 456, Form(group_size=group_size, permuted=True))
        for m in (1, 12, 70):
            x = problem.x(m)
            check(kernels, problem, x, problem.product(x))
