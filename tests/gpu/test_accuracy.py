"""Numbers of every kind against float64, the CPU kernels and the outputs of real checkpoints."""

from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import bound_of as summation_bound
from gpu.bounds import assert_near, norms
from gpu.loading import RecordingKernels
from gpu.problems import DTYPES, FORMS, Form, Problem
from random_layers import random_layer

from qlinear_service.checkpoints import open_checkpoint
from qlinear_service.dtypes import DType
from qlinear_service.kernels import build, packing, reference
from qlinear_service.kernels.backends import CpuKernels
from qlinear_service.kernels.torch_types import from_torch
from qlinear_service.layers import LogicalLayer

VECTORS = Path(__file__).parents[1] / "data" / "vectors"
WITH_OUTPUTS = sorted(path.parent.name for path in VECTORS.glob("*/reference.npz"))
SHAPES = ((4096, 4096), (11008, 1032), (28672, 520), (7168, 2112), (512, 8192), (200, 72))
ROWS = (1, 8, 13, 16, 32, 64, 100, 250)
CUT_SUMS = 3
"""Tensor cores cut where float32 additions round to nearest: at most 17 addends lose a whole unit
for each 16 products, where the bound of rounded sums counts half a unit for each product."""


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
                assert_near(problem, y, exact[:m], norm[:m], name=str(dtype))


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
                assert_near(problem, y, exact, norm, name=str(x_dtype))


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
            assert_near(problem, y, exact, norm, name=name)


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    try:
        with build.cpu_library(build.default_cache_dir()) as path:
            return CpuKernels(path, threads=4)
    except build.ToolMissing as missing:
        pytest.skip(str(missing))


def assert_alike(
    kernels: RecordingKernels, cpu: CpuKernels, layer: LogicalLayer, x: torch.Tensor
) -> None:
    """Compare both kernels with float64 and with each other."""
    packed = packing.pack(layer)
    on_gpu = kernels.to_device(packed)
    exact = reference.linear(layer, x, output_dtype=DType.F32, precision=torch.float64).double()
    for dtype in DType:
        bound = summation_bound(layer, x, exact, dtype)
        ours = kernels.linear(on_gpu, x.to(kernels.device), dtype).cpu().double()
        theirs = cpu.linear(packed, x, dtype).double()
        assert ((ours - exact).abs() <= CUT_SUMS * bound).all(), layer.spec.shape
        assert ((ours - theirs).abs() <= (CUT_SUMS + 1) * bound).all(), layer.spec.shape


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_cpu_and_gpu_agree(kernels: RecordingKernels, cpu: CpuKernels, form: Form) -> None:
    """Layers from the CPU's own tests, packed on the CPU."""
    for m, n, k in ((1, 100, 200), (9, 256, 1024), (70, 33, 2500)):
        layer = random_layer(
            n=n, k=k, bits=form.bits, group_size=form.group_size, symmetric=form.symmetric,
            bias=True, permuted=form.symmetric, scale_dtype=DType(1 + k % 3),
        )  # fmt: skip
        assert_alike(kernels, cpu, layer, torch.randn(m, k).half())


def test_there_are_vectors_with_outputs() -> None:
    assert len(WITH_OUTPUTS) >= 9


@pytest.mark.parametrize("name", WITH_OUTPUTS)
def test_outputs_of_real_checkpoints(kernels: RecordingKernels, name: str) -> None:
    checkpoint = open_checkpoint(VECTORS / name)
    with np.load(VECTORS / name / "reference.npz") as stored:
        for spec in checkpoint.layers:
            layer = checkpoint.load(spec.module)
            x = torch.from_numpy(stored[f"{spec.module}.x"])
            key = "y_bias" if spec.has_bias and f"{spec.module}.y_bias" in stored else "y"
            expected = torch.from_numpy(stored[f"{spec.module}.{key}"])
            on_gpu = kernels.to_device(packing.pack(layer))
            for dtype in DType:
                y = kernels.linear(on_gpu, x.to(kernels.device), dtype).cpu().double()
                bound = CUT_SUMS * summation_bound(layer, x, expected, dtype)
                assert ((y - expected).abs() <= bound).all(), spec.module


@pytest.mark.parametrize("name", WITH_OUTPUTS)
def test_cpu_and_gpu_agree_on_real_checkpoints(
    kernels: RecordingKernels, cpu: CpuKernels, name: str
) -> None:
    checkpoint = open_checkpoint(VECTORS / name)
    for spec in checkpoint.layers:
        assert_alike(kernels, cpu, checkpoint.load(spec.module), torch.randn(5, spec.k).half())
