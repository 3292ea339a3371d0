"""Numbers of every kind against float64 and the CPU kernels; real checkpoints: test_vectors.py."""

import pytest
import torch
from gpu.alike import assert_alike
from gpu.bounds import assert_near, norms
from gpu.loading import RecordingKernels
from gpu.problems import DTYPES, FORMS, Form, Problem
from random_layers import random_layer

from qlinear_service.dtypes import DType
from qlinear_service.kernels.backends import CpuKernels
from qlinear_service.kernels.torch_types import from_torch

SHAPES = ((4096, 4096), (11008, 1032), (28672, 520), (7168, 2112), (512, 8192), (200, 72))
ROWS = (1, 8, 13, 16, 32, 64, 100, 250)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_error_against_float64(
    kernels: RecordingKernels, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    k, n = shape
    for form in (Form(), Form(bits=8, group_size=32, symmetric=False, bias=torch.float16),
                 Form(group_size=-1), Form(group_size=64, scale_dtype=DType.F32)):  # fmt: skip
        problem = Problem(kernels.device, n, k, form, exact=False)
        x = problem.normal_x(ROWS[-1], dtype)
        exact, norm = problem.product(x), norms(problem, x)
        for m in ROWS:
            for y_dtype in (dtype, torch.float32):
                y = kernels.linear(problem.layer, x[:m], from_torch(y_dtype))
                assert_near(kernels, problem, x[:m], y, exact[:m], norm[:m], name=str(dtype))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_format_and_dtype(kernels: RecordingKernels, form: Form) -> None:
    for scale_dtype in DType:
        given = Form(
            bits=form.bits, group_size=form.group_size, symmetric=form.symmetric,
            scale_dtype=scale_dtype, bias=torch.bfloat16,
        )  # fmt: skip
        problem = Problem(kernels.device, 600, 1000, given, exact=False)
        for x_dtype in DTYPES:
            x = problem.normal_x(30, x_dtype)
            compute = torch.bfloat16 if scale_dtype is DType.BF16 else torch.float16
            seen = x.to(compute) if x_dtype == torch.float32 else x
            exact, norm = problem.product(seen), norms(problem, seen)
            for y_dtype in DTYPES:
                y = kernels.linear(problem.layer, x, from_torch(y_dtype))
                assert_near(kernels, problem, x, y, exact, norm, name=str(x_dtype))


def test_the_measure_would_see_a_wrong_group_or_row(kernels: RecordingKernels) -> None:
    """Scales of the neighbouring group, and rows g and g + 8 for each other, are far outside."""
    problem = Problem(kernels.device, 256, 1024, exact=False)
    x = problem.normal_x(16)
    exact, norm = problem.product(x), norms(problem, x)
    layer = problem.layer
    shifted = layer.scales.roll(1, dims=1)
    swapped = layer.qweight.view(torch.uint8)
    swapped = (swapped >> 4) | (swapped << 4)
    for name, scales, codes in (
        ("group", shifted, layer.qweight),
        ("rows", layer.scales, swapped.contiguous()),
    ):
        wrong = type(layer)(spec=layer.spec, qweight=codes, scales=scales)
        y = kernels.linear(wrong, x, DType.F16)
        with pytest.raises(AssertionError, match=name):
            assert_near(kernels, problem, x, y, exact, norm, name=name)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_cpu_and_gpu_agree(kernels: RecordingKernels, cpu: CpuKernels, form: Form) -> None:
    """Layers from the CPU's own tests, packed on the CPU."""
    for m, n, k in ((1, 100, 200), (9, 256, 1024), (70, 33, 2500)):
        layer = random_layer(
            n=n, k=k, bits=form.bits, group_size=form.group_size, symmetric=form.symmetric,
            bias=True, permuted=form.symmetric, scale_dtype=DType(1 + k % 3),
        )  # fmt: skip
        assert_alike(kernels, cpu, layer, torch.randn(m, k).half())
