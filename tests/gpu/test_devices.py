"""A second GPU: launches go where they are sent, whatever the current device is."""

import pytest
import torch
from gpu import loading
from gpu.loading import RecordingKernels
from gpu.problems import FEW_FORMS, Form, Problem, assert_same
from gpu.running import check, rounded

from qlinear_service.dtypes import DType


@pytest.fixture(scope="module")
def second(kernels: RecordingKernels) -> RecordingKernels:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        return loading.open_kernels(device=1)


def test_launches_on_the_second_while_the_first_is_current(second: RecordingKernels) -> None:
    """Large shared memory, too, is allowed for each device by itself."""
    with torch.cuda.device(0):
        for form in FEW_FORMS:
            problem = Problem(second.device, 520, 4096, form)
            for dtype in (torch.float16, torch.bfloat16):
                x = problem.x(70, dtype)
                exact = problem.product(x)
                for m in (1, 9, 17, 33, 70):
                    check(second, problem, x[:m], exact[:m])
                    assert torch.cuda.current_device() == 0


def test_both_at_once(kernels: RecordingKernels, second: RecordingKernels) -> None:
    both = (kernels, second)
    problems = [Problem(each.device, 1000, 4096) for each in both]
    xs = [problem.x(20) for problem in problems]
    expected = [rounded(p.product(x), torch.float32) for p, x in zip(problems, xs, strict=True)]
    ys: list[list[torch.Tensor]] = [[], []]
    for turn in range(200):
        with torch.cuda.device(turn % 2):
            for place, each in enumerate(both):
                ys[place].append(each.linear(problems[place].layer, xs[place], DType.F32))
    for place, results in enumerate(ys):
        for y in results:
            assert_same(y, expected[place])


def test_tensors_of_the_other_device_are_refused(
    kernels: RecordingKernels, second: RecordingKernels
) -> None:
    problem = Problem(kernels.device, 64, 128)
    with pytest.raises(ValueError, match="is on cuda:0; move it with to_device"):
        second.linear(problem.layer, problem.x(3).to(second.device), DType.F16)
    moved = second.to_device(problem.layer)
    with pytest.raises(ValueError, match=r"on cuda:0; expected .* on cuda:1"):
        second.linear(moved, problem.x(3), DType.F16)


def test_helpers_on_the_second(second: RecordingKernels) -> None:
    with torch.cuda.device(0):
        problem = Problem(second.device, 96, 256, Form(permuted=True))
        weights = second.dequantize(problem.layer, DType.F32)
        assert_same(weights[:, problem.logical.k_permutation.argsort()],  # type: ignore[union-attr]
                    problem.weights(0, 96).float())  # fmt: skip
        x = problem.x(5)
        check(second, problem, x, problem.product(x))
        memory = torch.zeros(1 << 20, dtype=torch.int64, device=second.device)
        assert second.read_seconds(memory, 1 << 20) > 0
