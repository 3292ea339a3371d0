"""What layers of one launch give to each other.

Every layer selects some of its input features, so that each result through the whole chain is
exactly known; x is another one at every launch, so that what an earlier launch left shows.
"""

from collections.abc import Sequence

import pytest
import torch
from gpu.chains import Chain, Selection, skip_unless_even
from gpu.loading import RecordingKernels, memory_of_its_own
from gpu.problems import Form, Problem, assert_same

from qlinear_service.kernels.torch_types import from_torch

DTYPES = (torch.float16, torch.bfloat16)
TURNS = 60

BLOCK = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
PADDED = ((4096, 6100), (6080, 4099), (4096, 8390), (1088, 4096))
"""(k, n): columns that no word of four results fills, halves of steps."""
SMALL = ((2048, 2100), (2048, 2048), (2048, 2112), (2048, 2048))
"""Slots of several steps."""
WIDE_AND_NARROW = ((4096, 28672), (14336, 2048), (2048, 4096))
"""Slots as large as those of wide tiles hold many steps of narrow ones."""
LONG = ((4096, 4096),) * 8
LARGE = ((512, 135168), (512, 135168), (512, 135168), (512, 135168), (512, 4096))
"""Four tiles in each share."""


@pytest.fixture(autouse=True)
def _hopper(kernels: RecordingKernels) -> None:
    skip_unless_even(kernels)


def selections(
    kernels: RecordingKernels, shapes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> list[Selection]:
    """Return layers of these (k, n); every other one has a single group of scales."""
    scale_dtype = from_torch(dtype)
    return [
        Selection(
            kernels.device, n, k, Form(group_size=(128, -1)[place % 2], scale_dtype=scale_dtype),
            seed=place,
        )
        for place, (k, n) in enumerate(shapes)
    ]  # fmt: skip


def assert_right(chain: Chain, reads: Sequence[int] | None = None) -> None:
    """Compare every layer; each reads the result of the one before, or of those that are named."""
    for place, problem in enumerate(chain.problems):
        assert isinstance(problem, Selection)
        giver = place - 1 if reads is None else reads[place]
        source = chain.x if giver < 0 else chain.ys[giver]
        right = problem.selected(source[:, : problem.logical.spec.k])
        assert_same(chain.ys[place].contiguous(), right)


def new_x(chain: Chain) -> None:
    """Have the next launch read other numbers, which every 16-bit dtype holds."""
    chain.x.copy_(torch.randint(-120, 121, chain.x.shape, device=chain.x.device))


def chain_of(
    kernels: RecordingKernels,
    problems: Sequence[Problem],
    m: int,
    dtype: torch.dtype,
    gap: int | None = None,
) -> Chain:
    k = problems[0].logical.spec.k
    x = torch.zeros((m, k), dtype=dtype, device=kernels.device)
    return Chain(kernels, problems, x, y_gap=gap or 0, aligned=gap is None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shapes", [BLOCK, PADDED, SMALL, WIDE_AND_NARROW, LONG, LARGE], ids=lambda s: str(s[0])
)
@pytest.mark.parametrize("m", [1, 2, 3, 8, 9, 16])
def test_each_layer_reads_this_launchs_results(
    kernels: RecordingKernels, dtype: torch.dtype, shapes: Sequence[tuple[int, int]], m: int
) -> None:
    with memory_of_its_own():
        chain = chain_of(kernels, selections(kernels, shapes, dtype), m, dtype)
        assert chain.launches() == [len(shapes)]
        for _ in range(TURNS):
            new_x(chain)
            chain.spoil()
            chain.call()
            assert_right(chain)
        chain.assert_settled()


@pytest.mark.parametrize("gap", [4, 5, 8])
@pytest.mark.parametrize("m", [2, 8])
def test_rows_with_something_between(kernels: RecordingKernels, gap: int, m: int) -> None:
    """Rows of x must begin at multiples of 16 bytes: other gaps are launches of their own."""
    shapes = ((4096, 4096),) * 4
    chain = chain_of(kernels, selections(kernels, shapes, torch.float16), m, torch.float16, gap)
    assert chain.launches() == ([4] if gap == 8 else [1] * 4)
    for _ in range(TURNS):
        new_x(chain)
        chain.spoil()
        chain.call()
        assert_right(chain)


@pytest.mark.parametrize("m", [1, 2, 4, 16])
def test_one_result_is_read_by_several(kernels: RecordingKernels, m: int) -> None:
    """As q, k and v read the same; and a layer that reads what one far before it gave."""
    shapes = ((4096, 4096),) * 7
    chain = chain_of(kernels, selections(kernels, shapes, torch.float16), m, torch.float16)
    reads = (-1, 0, 0, 0, 2, -1, 1)
    for place, giver in enumerate(reads):
        chain.reads(place, chain.x if giver < 0 else chain.ys[giver])
    assert chain.launches() == [7]
    for _ in range(TURNS):
        new_x(chain)
        chain.spoil()
        chain.call()
        assert_right(chain, reads)


@pytest.mark.parametrize("m", [1, 2, 4, 16])
def test_a_layer_that_reads_columns_from_the_middle(kernels: RecordingKernels, m: int) -> None:
    shapes = ((4096, 8192), (4096, 4096), (4096, 4096), (4096, 4096))
    chain = chain_of(kernels, selections(kernels, shapes, torch.float16), m, torch.float16)
    middle = chain.ys[0][:, 2048:]
    chain.reads(1, middle)
    assert chain.launches() == [4]
    for _ in range(TURNS):
        new_x(chain)
        chain.spoil()
        chain.call()
        right = chain.problems[0].selected(chain.x)  # type: ignore[attr-defined]
        assert_same(chain.ys[0], right)
        right = chain.problems[1].selected(middle[:, :4096])  # type: ignore[attr-defined]
        assert_same(chain.ys[1], right)
        for place in (2, 3):
            problem = chain.problems[place]
            assert_same(chain.ys[place], problem.selected(chain.ys[place - 1]))  # type: ignore[attr-defined]


def test_chains_take_turns_on_one_workspace(kernels: RecordingKernels) -> None:
    """Of different rows and layers, called and recorded: none takes what another one left."""
    with memory_of_its_own():
        made = [
            chain_of(kernels, selections(kernels, shapes, torch.float16), m, torch.float16)
            for shapes, m in ((BLOCK, 1), (LONG, 2), (PADDED, 1), (BLOCK, 16), (SMALL, 2))
        ]
        for chain in made[1:]:
            chain.workspace = made[0].workspace
        with made[1].recorded() as handle:
            for turn in range(3 * TURNS):
                chain = made[turn * 7 % 5]
                new_x(chain)
                chain.spoil()
                if chain is made[1]:
                    chain.replay(handle)
                else:
                    chain.call()
                assert_right(chain)
        made[0].assert_settled()
