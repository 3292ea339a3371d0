"""Several layers in one launch (csrc/cuda/chain_kernel.cuh), on Hopper alone.

Sums have another order than those of single calls, so results are compared with what is exact, or
with float64 of what a chain really gave each layer. They must be the same bits every time.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from gpu.bounds import assert_near, norms
from gpu.chains import BLOCK, Chain, block_of, form_of, skip_unless_even, small_x
from gpu.loading import RecordingKernels, memory_of_its_own
from gpu.problems import Form, Problem, assert_same
from gpu.running import rounded

from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda_abi import CudaFlag
from qlinear_service.kernels.torch_types import from_torch

ROWS = (1, 2, 3, 5, 7, 8, 9, 13, 16)
DTYPES = (torch.float16, torch.bfloat16)

MIXED = (
    *((4096, 8448), (4096, 64), (512, 2100), (4096, 8448)),
    *((1088, 200), (512, 6144), (1088, 4096), (4096, 8448)),
)
"""(k, n): large and small, padded along n and along k; even enough together."""
OTHERS = (
    *((4096, 6144), (1088, 8448), (512, 200), (4096, 4096)),
    *((512, 64), (4096, 2100), (512, 4096), (4096, 6144)),
)
SMALL = ((4096, 2048), (1088, 2112), (4096, 2048), (4096, 2048))
"""Tiles of one n-block, of which the ring holds few steps."""
WIDE = ((512, 34000), (1088, 70000))
"""Several tiles in each share."""


@pytest.fixture(autouse=True)
def _hopper(kernels: RecordingKernels) -> None:
    skip_unless_even(kernels)


def assert_exact(
    kernels: RecordingKernels,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    group_size: int,
    launches: list[int],
    *,
    y_gap: int = 0,
) -> None:
    """Compute layers on one x, every other one with a bias, and compare every bit."""
    made: dict[tuple[int, int], Problem] = {}
    for place, (k, n) in enumerate(shapes):
        bias = (None, torch.float32, None, torch.bfloat16)[place % 4]
        if (k, n) not in made:
            made[k, n] = Problem(kernels.device, n, k, form_of(dtype, group_size, bias), seed=place)
    problems = [made[shape] for shape in shapes]
    x = max(problems, key=lambda one: one.logical.spec.k).x(max(ROWS), dtype)
    exact = {shape: problem.product(x[:, : shape[0]]) for shape, problem in made.items()}
    for m in ROWS:
        for y_dtype in (torch.float32, dtype):
            chain = Chain(kernels, problems, x[:m], shared=True, dtype=y_dtype, y_gap=y_gap)
            assert chain.launches() == launches
            for _ in range(2):
                chain.spoil()
                chain.call()
                for y, shape in zip(chain.ys, shapes, strict=True):
                    assert_same(y.contiguous(), rounded(exact[shape][:m], y_dtype))
                chain.assert_settled()
            for room, y in zip(chain.rooms, chain.ys, strict=True):
                assert room[:, y.shape[1] :].isnan().all(), "written between rows of y"
            assert (chain.scratch == 0xFF).all(), "scratch was written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [-1, 128])
@pytest.mark.parametrize("shapes", [MIXED, OTHERS, SMALL, WIDE], ids=lambda shapes: len(shapes))
def test_layers_on_one_x_are_exact(
    kernels: RecordingKernels,
    dtype: torch.dtype,
    group_size: int,
    shapes: Sequence[tuple[int, int]],
) -> None:
    with memory_of_its_own():
        assert_exact(kernels, shapes, dtype, group_size, [len(shapes)])


@pytest.mark.parametrize("count", [9, 17])
def test_more_layers_than_one_launch_takes(kernels: RecordingKernels, count: int) -> None:
    shapes = (MIXED * 3)[:count]
    launches = {9: [8, 1], 17: [8, 8, 1]}[count]
    with memory_of_its_own():
        assert_exact(kernels, shapes, torch.float16, 128, launches)


@pytest.mark.parametrize("y_gap", [1, 4, 12])
def test_rows_of_results_with_something_between(kernels: RecordingKernels, y_gap: int) -> None:
    with memory_of_its_own():
        assert_exact(kernels, MIXED, torch.float16, 128, [8], y_gap=y_gap)


def assert_each_layer_near(chain: Chain, *, launches: Sequence[int]) -> None:
    """Compare each layer with float64, on what the chain gave it, and with a single call."""
    place = 0
    for length in launches:
        for one in range(place, place + length):
            problem, x, y = chain.problems[one], chain.xs[one], chain.ys[one]
            exact, norm = problem.product(x), norms(problem, x)
            name = f"layer {one} of {launches}"
            assert_near(chain.kernels, problem, x, y, exact, norm, name=name, planned=length == 1)
            alone = chain.kernels.linear(problem.layer, x.contiguous(), from_torch(y.dtype))
            assert_near(chain.kernels, problem, x, alone, exact, norm, name=f"{name}, alone")
        place += length


def assert_same_bits(chain: Chain, turns: int = 50) -> None:
    """Compare repetitions of a chain with what it has written."""
    first = chain.results()
    assert all(y.isfinite().all() for y in first)
    for _ in range(turns):
        chain.spoil()
        chain.call()
        for y, right in zip(chain.ys, first, strict=True):
            assert_same(y, right)
    chain.assert_settled()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [-1, 128])
@pytest.mark.parametrize("m", [1, 4, 8, 9, 12, 16])
def test_each_layer_reads_what_the_one_before_wrote(
    kernels: RecordingKernels, dtype: torch.dtype, group_size: int, m: int
) -> None:
    problems = block_of(kernels, form_of(dtype, group_size))
    chain = Chain(kernels, problems, small_x(problems, m, dtype))
    assert chain.launches() == [4]
    chain.spoil()
    chain.call(CudaFlag.DEPENDENT)
    assert_each_layer_near(chain, launches=[4])
    assert_same_bits(chain)


@pytest.mark.parametrize("count", [9, 17])
@pytest.mark.parametrize("m", [1, 8, 16])
def test_long_chains_go_on_from_launch_to_launch(
    kernels: RecordingKernels, count: int, m: int
) -> None:
    """In bfloat16, whose range holds what grows through 17 layers."""
    problems = block_of(kernels, form_of(torch.bfloat16), [(4096, 4096)] * count)
    chain = Chain(kernels, problems, small_x(problems, m, torch.bfloat16))
    launches = {9: [8, 1], 17: [8, 8, 1]}[count]
    assert chain.launches() == launches
    chain.spoil()
    chain.call()
    assert_each_layer_near(chain, launches=launches)
    assert_same_bits(chain, turns=20)


@pytest.mark.parametrize("m", [1, 8, 16])
def test_a_layer_between_that_is_a_launch_of_its_own(kernels: RecordingKernels, m: int) -> None:
    """It overlaps with the launch in front, and the one behind waits for it."""
    shapes = [(4096, 4096)] * 5
    problems = block_of(kernels, form_of(torch.bfloat16), shapes)
    form = Form(bits=8, symmetric=False, scale_dtype=DType.BF16)
    problems[2] = Problem(kernels.device, 4096, 4096, form, exact=False)
    chain = Chain(kernels, problems, small_x(problems, m, torch.bfloat16))
    assert chain.launches() == [2, 1, 2]
    chain.spoil()
    chain.call()
    assert_each_layer_near(chain, launches=[2, 1, 2])
    assert_same_bits(chain)


@pytest.mark.parametrize("m", [1, 8, 16])
def test_layers_write_where_others_have_read(kernels: RecordingKernels, m: int) -> None:
    """The same bits as with memory of its own for each result."""
    problems = block_of(kernels, form_of(torch.float16), [(4096, 4096)] * 4)
    x = small_x(problems, m)
    apart = Chain(kernels, problems, x)
    assert apart.launches() == [4]
    apart.call()
    expected = apart.results()
    own_x = x.clone()
    buffers = [own_x, *(torch.empty_like(y) for y in apart.ys[:2])]
    # x -> 1 -> 2 -> 1 -> x: written where layer 0 wrote, and where layer 0 read.
    places = (0, 1, 2, 1, 0)
    pingpong = Chain(kernels, problems, own_x)
    for place in range(4):
        pingpong.reads(place, buffers[places[place]])
        pingpong.writes(place, buffers[places[place + 1]])
    assert pingpong.launches() == [4]
    for _ in range(50):
        own_x.copy_(x)
        for buffer in buffers[1:]:
            buffer.fill_(math.nan)
        pingpong.call()
        for buffer, right in zip(buffers, (expected[3], expected[2], expected[1]), strict=True):
            assert_same(buffer, right)


def test_columns_of_one_matrix(kernels: RecordingKernels) -> None:
    """Results side by side in the rows of one matrix, and layers that read some of its columns."""
    problems = [
        Problem(kernels.device, 4096, 4096, form_of(torch.float16), exact=False, seed=seed)
        for seed in range(3)
    ]
    x = small_x(problems, 5)
    apart = Chain(kernels, problems, x)
    apart.call()
    expected = apart.results()
    whole = torch.empty((5, 3 * 4096), dtype=torch.float16, device=kernels.device)
    beside = Chain(kernels, problems, x)
    columns = whole.split(4096, dim=1)
    for place in range(3):
        beside.reads(place, x if place == 0 else columns[place - 1])
        beside.writes(place, columns[place])
    assert beside.launches() == [3]
    for _ in range(20):
        whole.fill_(math.nan)
        beside.call()
        for y, right in zip(columns, expected, strict=True):
            assert_same(y.contiguous(), right)


@pytest.mark.parametrize("m", [1, 7, 8, 16])
def test_a_recorded_chain_gives_the_bits_of_a_call(kernels: RecordingKernels, m: int) -> None:
    problems = block_of(kernels, form_of(torch.float16))
    chain = Chain(kernels, problems, small_x(problems, m))
    assert chain.launches() == [4]
    with chain.recorded() as handle:
        for turn in range(50):
            if turn % 10 == 0:
                chain.x.copy_(small_x(problems, m))
                chain.call()
                expected = chain.results()
            chain.spoil()
            chain.replay(handle)
            for y, right in zip(chain.ys, expected, strict=True):
                assert_same(y, right)
    assert_each_layer_near(chain, launches=[4])
    chain.assert_settled()


def test_without_a_workspace_each_is_called_alone(kernels: RecordingKernels) -> None:
    """Its counters lie there; plans for so few rows need none."""
    problems = block_of(kernels, Form())
    chain = Chain(kernels, problems, small_x(problems, 1))
    expected = chain.one_by_one()
    launch = chain.launch()
    launch.workspace, launch.workspace_bytes = None, 0
    chain.spoil()
    library = kernels.library
    assert library.ql_cuda_linear_chain(chain.params, None, len(BLOCK), launch) == 0
    for y, one in zip(chain.ys, expected, strict=True):
        assert_same(y, one)
