"""Every number of rows, every dtype of x, y and bias, and rows that lie apart or unaligned."""

import itertools

import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.problems import DTYPES, FEW_FORMS, Form, Problem
from gpu.running import Call, apart, check

from qlinear_service.dtypes import DType
from qlinear_service.kernels.torch_types import to_torch

ROWS = (
    *range(1, 18), 23, 24, 25, *range(31, 34), 40, 47, 48, 49, *range(63, 67), 71, 72, 73, 96, 100,
    *range(127, 131), 191, 192, 193, 250, 255, 256, 257, 1000, 1024, 4096,
)  # fmt: skip


@pytest.mark.parametrize("form", FEW_FORMS, ids=str)
@pytest.mark.parametrize("shape", [(1096, 1160), (272, 4096), (40, 130)], ids=str)
def test_every_number_of_rows(
    kernels: RecordingKernels, form: Form, shape: tuple[int, int]
) -> None:
    """Below, at and beyond each edge of a tile, of eight rows and of the highest tile."""
    problem = Problem(kernels.device, *shape, form)
    for dtype in (torch.float16, torch.bfloat16):
        x = problem.x(ROWS[-1], dtype)
        exact = problem.product(x)
        for m in ROWS:
            check(kernels, problem, x[:m], exact[:m])


def test_every_dtype_of_x_y_and_bias(kernels: RecordingKernels) -> None:
    for bias, scales, bits in itertools.product((None, *DTYPES), DType, (4, 8)):
        form = Form(bits=bits, bias=bias, scale_dtype=scales)
        problem = Problem(kernels.device, 72, 264, form)
        for x_dtype in DTYPES:
            x = problem.x(37, x_dtype)
            exact = problem.product(x)
            for y_dtype, m in itertools.product(DTYPES, (5, 37)):
                check(kernels, problem, x[:m], exact[:m], y_dtype)


def test_float32_x_is_rounded_to_the_compute_dtype_and_to_nearest(
    kernels: RecordingKernels,
) -> None:
    """Halfway between two neighbours to the even one, a little above to the upper one."""
    for scales, unit in ((DType.F16, 2.0**-10), (DType.BF16, 2.0**-7)):
        form = Form(scale_dtype=scales, group_size=-1)
        problem = Problem(kernels.device, 64, 128, form)
        steps = torch.arange(128, device=kernels.device).float() / 4
        x = (1 + steps * unit)[None, :].repeat(3, 1)
        x[1] += 2.0**-20
        x[2] = -x[1]
        narrow = x.to(to_torch(scales))
        assert not torch.equal(narrow.float(), x)
        for row in range(3):
            exact = problem.product(narrow[row : row + 1])
            check(kernels, problem, x[row : row + 1], exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_x_may_lie_anywhere(kernels: RecordingKernels, dtype: torch.dtype) -> None:
    """Odd sizes, odd strides, and starts that no vector load can use; NaN lies all around."""
    for k in (1, 7, 63, 199, 200, 256):
        problem = Problem(kernels.device, 70, k, Form(group_size=32))
        for m in (1, 3, 20, 67):
            x = problem.x(m, dtype)
            exact = problem.product(x)
            for gap, offset in ((0, 0), (0, 1), (1, 0), (1, 3), (3, 2), (8, 8), (24, 4), (56, 0)):
                rows = apart(x, stride=k + gap, offset=offset)
                check(kernels, problem, rows, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_y_may_lie_apart(kernels: RecordingKernels, dtype: torch.dtype) -> None:
    for n in (1, 2, 3, 7, 64, 70, 100, 129):
        problem = Problem(kernels.device, n, 384, Form(bias=torch.float16))
        for m in (1, 5, 33):
            x = problem.x(m)
            exact = problem.product(x)
            for gap in (0, 1, 2, 4, 8, 61):
                Call(kernels, problem, x, dtype, y_stride=n + gap).check(exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_y_may_begin_anywhere(kernels: RecordingKernels, dtype: torch.dtype) -> None:
    problem = Problem(kernels.device, 100, 384)
    x = problem.x(19)
    exact = problem.product(x)
    for offset in (1, 2, 3, 4, 5):
        call = Call(kernels, problem, x, dtype, y_stride=108)
        # One column further to the right, still inside its row.
        call.y = call._y_rows[:, offset : offset + 100]
        call.params.y = call.y.data_ptr()
        assert call.run() == 0
        assert torch.equal(call.y, exact.to(dtype))
        assert call._y_rows[:, :offset].isnan().all()
        assert call._y_rows[:, offset + 100 :].isnan().all()


def test_rows_that_are_one_row(kernels: RecordingKernels) -> None:
    problem = Problem(kernels.device, 64, 256)
    x = problem.x(1).expand(9, 256)
    check(kernels, problem, x, problem.product(x))


def test_no_rows(kernels: RecordingKernels) -> None:
    problem = Problem(kernels.device, 64, 256)
    call = Call(kernels, problem, problem.x(2))
    call.params.m = 0
    assert call.run() == 0
    kernels.wait()
    assert call.y.isnan().all()
    call.params.x = call.params.y = None
    call.launch.workspace = None
    assert call.run() == 0
