"""What a launch leaves behind and what it may find: nothing. Memory, counters, repeats.

Graphs and streams: test_streams.py.
"""

import itertools

import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.problems import FEW_FORMS, Form, Problem, assert_same
from gpu.running import Call, apart, check, rounded, split_plan

from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda_abi import CudaFlag

# One tile and many of them, few rows and many, short and long k.
SHAPES = ((1, 4096, 64), (1, 4096, 4096), (7, 11008, 200), (16, 1024, 1030), (40, 8192, 520),
          (64, 3000, 96), (130, 4096, 300), (300, 520, 2100))  # fmt: skip


def problems(device: torch.device) -> list[tuple[Problem, torch.Tensor]]:
    found = []
    for place, (m, k, n) in enumerate(SHAPES):
        problem = Problem(device, n, k, FEW_FORMS[place % len(FEW_FORMS)])
        dtype = torch.bfloat16 if place % 2 else torch.float16
        found.append((problem, problem.x(m, dtype)))
    return found


def test_memory_around_y_and_the_workspace_is_left_alone(kernels: RecordingKernels) -> None:
    """The workspace is not a byte larger than the plan needs, its scratch and y full of NaN."""
    split = 0
    for problem, x in problems(kernels.device):
        exact = problem.product(x)
        n = problem.logical.spec.n
        for plan, (dtype, gap) in itertools.product(
            (None, split_plan(kernels, problem, x)), ((torch.float32, 0), (torch.float16, 3))
        ):
            call = Call(kernels, problem, x, dtype, plan=plan, y_stride=n + gap)
            needed = call.needed_bytes()
            if needed:
                call.use_workspace(needed)
                split += 1
            for _ in range(3):
                call.y.fill_(float("nan"))
                call.check(exact)
    assert split >= 2 * len(SHAPES)


def test_a_plan_that_splits_no_tile_needs_no_workspace(kernels: RecordingKernels) -> None:
    problem = Problem(kernels.device, 4096, 512)
    x = problem.x(3)
    call = Call(kernels, problem, x, flags=CudaFlag.BATCH_INVARIANT)
    call.launch.workspace, call.launch.workspace_bytes = None, 0
    call.check(problem.product(x))


def test_inputs_are_only_read(kernels: RecordingKernels) -> None:
    for problem, x in problems(kernels.device):
        layer = problem.layer
        tensors = [t for t in (x, layer.qweight, layer.scales, layer.zeros, layer.bias)
                   if t is not None]  # fmt: skip
        before = [tensor.clone() for tensor in tensors]
        kernels.linear(layer, x, DType.F16)
        for tensor, copy in zip(tensors, before, strict=True):
            assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("place", range(len(SHAPES)))
def test_a_thousand_launches_give_the_same_bits(
    kernels: RecordingKernels, place: int, split: bool
) -> None:
    m, k, n = SHAPES[place]
    problem = Problem(kernels.device, n, k, FEW_FORMS[place % len(FEW_FORMS)], exact=False)
    x = problem.normal_x(m)
    plan = split_plan(kernels, problem, x) if split else None
    call = Call(kernels, problem, x, plan=plan)
    assert call.run() == 0
    first = call.y.clone()
    differing = torch.zeros((), dtype=torch.int64, device=kernels.device)
    for _ in range(1000):
        call.y.fill_(float("nan"))
        assert call.run() == 0
        differing += (call.y != first).any()
    assert differing.item() == 0
    assert not call.counters.any()


def test_one_workspace_serves_all_shapes_in_turn(kernels: RecordingKernels) -> None:
    """Nothing of one launch shows in the next, whatever plans they have."""
    everything = [(problem, x, rounded(problem.product(x), torch.float32))
                  for problem, x in problems(kernels.device)]  # fmt: skip
    workspace = None
    draw = torch.Generator().manual_seed(0)
    for _ in range(40):
        for place in torch.randperm(len(everything), generator=draw).tolist():
            problem, x, expected = everything[place]
            rows = int(torch.randint(1, len(x) + 1, (), generator=draw))
            call = Call(kernels, problem, x[:rows])
            if rows % 2:
                call.plan = split_plan(kernels, problem, x[:rows])
            workspace = workspace or call.workspace
            call.launch.workspace = workspace.bytes.data_ptr()
            assert call.run() == 0
            assert_same(call.y, expected[:rows])
            assert not workspace.bytes[: 1024 * 1024].any()
    assert workspace is not None
    workspace.assert_intact("the workspace")


def test_launches_allocate_nothing(kernels: RecordingKernels) -> None:
    problem = Problem(kernels.device, 4096, 1024)
    x = problem.x(5)
    y = kernels.linear(problem.layer, x, DType.F16)
    kernels.wait()
    count = torch.cuda.memory_stats(kernels.device)["allocation.all.allocated"]
    free = torch.cuda.mem_get_info(kernels.device)[0]
    for m in (1, 5):
        for _ in range(200):
            kernels.linear(problem.layer, x[:m], DType.F16, out=y[:m])
    kernels.wait()
    assert torch.cuda.memory_stats(kernels.device)["allocation.all.allocated"] == count
    assert torch.cuda.mem_get_info(kernels.device)[0] == free


def test_a_refused_call_changes_nothing(kernels: RecordingKernels) -> None:
    problem = Problem(kernels.device, 300, 4096, Form(group_size=32))
    x = problem.x(20)
    call = Call(kernels, problem, x)
    call.params.bits = 5
    assert call.run() != 0
    call.params.bits = 4
    assert call.y.isnan().all()
    call.check(problem.product(x))


def test_layers_of_one_size_share_no_plan_that_does_not_fit(kernels: RecordingKernels) -> None:
    """Plans are remembered by size; format, dtype and alignment of x decide, too."""
    forms = [*FEW_FORMS, Form(bits=8), Form(symmetric=False), Form(group_size=32)]
    layers = [Problem(kernels.device, 200, 2048, form) for form in forms]
    for _ in range(2):
        for m, dtype in itertools.product(
            (1, 9, 64), (torch.float16, torch.float32, torch.bfloat16)
        ):
            for problem in layers:
                x = problem.x(m, dtype)
                exact = problem.product(x)
                for rows in (x, apart(x, stride=2049, offset=1), x):
                    check(kernels, problem, rows, exact)
