"""Large numbers, no numbers, and sizes beyond 32 bits."""

import pytest
import torch
from gpu.loading import RecordingKernels, memory_of_its_own
from gpu.problems import DTYPES, Form, Problem, assert_same
from gpu.running import check, rounded

from qlinear_service.dtypes import DType
from qlinear_service.kernels import packing
from qlinear_service.kernels.torch_types import from_torch
from qlinear_service.layers import LayerSpec, QuantizedLinear

LONG_K = 28672
LARGE = 1000.0


def opposed(device: torch.device, form: Form) -> Problem:
    """A layer whose first half of k weighs +7 and whose second half -7, the last feature all +3.

    With x of a thousand, sums in between reach 1e8, and all but the last feature end near zero.
    """
    problem = Problem(device, 72, LONG_K, form)
    middle = 2 ** (form.bits - 1)
    problem.logical.codes[: LONG_K // 2] = middle + 7
    problem.logical.codes[LONG_K // 2 :] = middle - 7
    problem.logical.codes[:, -1] = middle + 3
    problem.logical.scales.fill_(1.0)
    with device:
        problem.layer = packing.pack(problem.logical)
    return problem


@pytest.mark.parametrize("group_size", [-1, 32, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_sums_overflow_only_where_the_result_does(
    kernels: RecordingKernels, bits: int, group_size: int
) -> None:
    problem = opposed(kernels.device, Form(bits=bits, group_size=group_size))
    for x_dtype in DTYPES:
        x = torch.full((17, LONG_K), LARGE, device=kernels.device).to(x_dtype)
        # Rows end at 0, -7000, -14000 and so on, up to beyond float16.
        for row in range(17):
            x[row, :row] = 0
        exact = problem.product(x)
        assert (exact[:, :-1].abs() <= 7 * 17 * LARGE * 1.01).all()
        for m in (1, 17):
            for y_dtype in DTYPES:
                check(kernels, problem, x[-m:], exact[-m:], y_dtype)
        narrow = rounded(exact, torch.float16)
        assert narrow.isinf().any()
        assert narrow[:, :-1].isfinite().any()


def test_results_at_the_edge_of_float16(kernels: RecordingKernels) -> None:
    """65519 rounds to 65504, 65520 to infinity; so do their negatives."""
    problem = Problem(kernels.device, 64, 128, Form(group_size=-1))
    problem.logical.codes.fill_(9)
    problem.logical.scales.fill_(1.0)
    with kernels.device:
        problem.layer = packing.pack(problem.logical)
    x = torch.zeros(6, 128, device=kernels.device).half()
    for row, last in enumerate((15, 16, 17, -15, -16, -17)):
        sign = 1 if last > 0 else -1
        x[row, 0], x[row, 1] = sign * 65504.0, last
    y = kernels.linear(problem.layer, x, DType.F16)
    expected = torch.tensor([65504.0, torch.inf, torch.inf, -65504.0, -torch.inf, -torch.inf])
    assert_same(y[:, 0].float().cpu(), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_in_its_row(kernels: RecordingKernels, bad: float) -> None:
    for k, n in ((130, 65), (4096, 200), (2048, 4096)):
        for form in (Form(bias=torch.float16), Form(bits=8, group_size=32, symmetric=False)):
            problem = Problem(kernels.device, n, k, form)
            for x_dtype in DTYPES:
                x = problem.x(70, x_dtype)
                exact = problem.product(x)
                for m, row, column in ((1, 0, 3), (6, 2, k - 1), (40, 39, 0), (70, 64, k // 2)):
                    given = x[:m].clone()
                    given[row, column] = bad
                    y = kernels.linear(problem.layer, given, DType.F32)
                    others = [other for other in range(m) if other != row]
                    assert_same(y[others], rounded(exact[:m][others], torch.float32))
                    weight = problem.weights(0, n)[:, column]
                    sound = y[row].isfinite()
                    # Times a weight of zero, infinity is no number either.
                    assert not sound.any(), f"{bad} was lost at weights {weight[sound][:5]}"
                    plan = kernels.plan(problem.layer, m, from_torch(x_dtype), DType.F32)
                    raw = plan.copy_warp and plan.token_blocks <= 2
                    # Raw codes and sums of x are both infinite, which leaves no number.
                    if bad == bad and not raw:
                        infinite = y[row][weight != 0]
                        assert_same(infinite, (bad * weight[weight != 0].sign()).float())


def test_subnormal_numbers_count(kernels: RecordingKernels) -> None:
    """The smallest x and results that float16 has, which fast modes would flush to zero."""
    problem = Problem(kernels.device, 64, 128, Form(group_size=-1))
    problem.logical.scales.fill_(1.0)
    with kernels.device:
        problem.layer = packing.pack(problem.logical)
    x = torch.zeros(9, 128, device=kernels.device).half()
    x[:, 5] = torch.tensor([2.0**-24 * i for i in (1, 2, 3, 5, 7, 100, 1000, 1023, 1024)])
    exact = problem.product(x)
    for dtype in (torch.float16, torch.float32):
        check(kernels, problem, x, exact, dtype)
    tiny = torch.zeros(3, 128, device=kernels.device).bfloat16()
    tiny[:, 5] = torch.tensor([2.0**-120, 3 * 2.0**-118, 2.0**-100])
    check(kernels, problem, tiny, problem.product(tiny))


def first_and_last(problem: Problem, x: torch.Tensor, y: torch.Tensor, row: int) -> None:
    """Compare some rows at both ends and around `row`."""
    for begin in (0, row - 40, len(x) - 70):
        part = x[begin : begin + 70]
        assert_same(y[begin : begin + 70], rounded(problem.product(part), y.dtype))


def test_y_of_more_than_2_31_elements(kernels: RecordingKernels) -> None:
    with memory_of_its_own():
        problem = Problem(kernels.device, 32832, 128)
        x = problem.x(65600)
        y = kernels.linear(problem.layer, x, DType.F16)
        assert y.numel() > 2**31
        first_and_last(problem, x, y, 2**31 // 32832)
        for begin in range(0, len(x), 8200):
            part = x[begin : begin + 8200].half()
            wrong = y[begin : begin + 8200] != rounded(problem.product(part), torch.float16)
            assert not wrong.any(), begin
            del wrong


def test_x_of_more_than_2_31_elements(kernels: RecordingKernels) -> None:
    with memory_of_its_own():
        problem = Problem(kernels.device, 64, 33024)
        x = problem.x(65600)
        assert x.numel() > 2**31
        first_and_last(problem, x, kernels.linear(problem.layer, x, DType.F32), 2**31 // 33024)


def test_rows_that_are_far_apart(kernels: RecordingKernels) -> None:
    """Offsets beyond 2**31 elements through strides alone."""
    with memory_of_its_own():
        problem = Problem(kernels.device, 64, 128)
        x = problem.x(5)
        room = torch.empty(5 * 2**29 + 128, dtype=torch.float16, device=kernels.device)
        rows = room.as_strided((5, 128), (2**29, 1))
        rows.copy_(x)
        check(kernels, problem, rows, problem.product(x))
        out = room.as_strided((5, 64), (2**29, 1))
        kernels.linear(problem.layer, x, DType.F16, out=out)
        assert_same(out.contiguous(), rounded(problem.product(x), torch.float16))


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_more_than_2_31_bytes(kernels: RecordingKernels, bits: int) -> None:
    """Made in the runtime layout right away, where any bytes are codes; some features compared."""
    n, k = 65664, 65536 if bits == 4 else 32768
    spec = LayerSpec(
        model="gpu", module="large", n=n, k=k, bits=bits, group_size=128, symmetric=True,
        has_bias=False, scale_dtype=DType.F16,
    )  # fmt: skip
    draw = torch.Generator(kernels.device).manual_seed(bits)
    with memory_of_its_own():
        shape = (n // 16, k // 64, 128 * bits)
        codes = torch.randint(
            0, 256, shape, dtype=torch.uint8, generator=draw, device=kernels.device
        )
        assert codes.numel() > 2**31
        powers = torch.randint(-3, 1, (n // 16, k // 128, 16), generator=draw,
                               device=kernels.device)  # fmt: skip
        layer = QuantizedLinear(spec=spec, qweight=codes, scales=torch.exp2(powers.float()).half())
        x = torch.randint(-2, 3, (20, k), generator=draw, device=kernels.device).half()
        for m in (1, 20):
            y = kernels.linear(layer, x[:m], DType.F32)
            for begin in (0, 128, n // 2 // 64 * 64, n - 64):
                part = layer.features(begin, begin + 64)
                unpacked = packing.unpack_codes(part.qweight, bits).double() - 2 ** (bits - 1)
                scales = packing.unpack_columns(part.scales).double().repeat_interleave(128, 0)
                exact = x[:m].double() @ (unpacked * scales)
                assert_same(y[:, begin : begin + 64], rounded(exact, torch.float32))
