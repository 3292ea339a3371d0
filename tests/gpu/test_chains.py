"""Several layers in one call that no one launch computes: every bit as if each was called alone."""

import ctypes

import pytest
import torch
from gpu.chains import BLOCK, UNEVEN, Chain, block_of, small_x
from gpu.loading import RecordingKernels
from gpu.problems import Form, Problem, assert_same
from gpu.running import plan_of

from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda_abi import CudaFlag, CudaPlan, Status

ROWS = (1, 8, 16, 30, 64, 100)


def assert_every_bit(chain: Chain, *, turns: int = 1, flags: CudaFlag = CudaFlag.NONE) -> None:
    """Compare a chain with single calls, some times."""
    expected = chain.one_by_one(flags & CudaFlag.BATCH_INVARIANT)
    assert all(y.isfinite().all() for y in expected)
    for _ in range(turns):
        chain.spoil()
        chain.call(flags)
        for y, right in zip(chain.ys, expected, strict=True):
            assert_same(y, right)


@pytest.mark.parametrize(
    "form",
    [Form(bits=8, symmetric=False), Form(bits=8), Form(group_size=32), Form(symmetric=False)],
    ids=str,
)
@pytest.mark.parametrize("flags", [CudaFlag.NONE, CudaFlag.DEPENDENT], ids=str)
def test_layers_that_the_kernel_of_chains_does_not_know(
    kernels: RecordingKernels, form: Form, flags: CudaFlag
) -> None:
    problems = block_of(kernels, form)
    # Weights with zero points of their own have a mean, and results beyond fp16 after four layers.
    dtype = torch.float16 if form.symmetric else torch.bfloat16
    for m in ROWS:
        chain = Chain(kernels, problems, small_x(problems, m, dtype))
        assert chain.launches() == [1, 1, 1, 1]
        assert_every_bit(chain, turns=10, flags=flags)


@pytest.mark.parametrize("m", [17, 30, 64, 100])
@pytest.mark.parametrize("flags", [CudaFlag.NONE, CudaFlag.DEPENDENT], ids=str)
def test_more_rows_than_the_kernel_of_chains_takes(
    kernels: RecordingKernels, m: int, flags: CudaFlag
) -> None:
    problems = block_of(kernels, Form())
    chain = Chain(kernels, problems, small_x(problems, m))
    assert chain.launches() == [1, 1, 1, 1]
    assert_every_bit(chain, turns=10, flags=flags)


@pytest.mark.parametrize("m", ROWS)
def test_shares_that_are_too_uneven(kernels: RecordingKernels, m: int) -> None:
    problems = block_of(kernels, Form(), UNEVEN)
    chain = Chain(kernels, problems, small_x(problems, m))
    if kernels.info.sm_count != 132 and chain.launches() != [1, 1, 1, 1]:
        pytest.skip(f"{kernels.info.sm_count} multiprocessors share them out evenly")
    assert chain.launches() == [1, 1, 1, 1]
    assert_every_bit(chain, turns=10)


@pytest.mark.parametrize("m", [1, 9, 16])
def test_batch_invariant_layers_are_called_alone(kernels: RecordingKernels, m: int) -> None:
    problems = block_of(kernels, Form())
    chain = Chain(kernels, problems, small_x(problems, m))
    assert_every_bit(chain, turns=5, flags=CudaFlag.BATCH_INVARIANT)
    assert_every_bit(chain, turns=5, flags=CudaFlag.BATCH_INVARIANT | CudaFlag.DEPENDENT)


def test_many_layers_on_one_x(kernels: RecordingKernels) -> None:
    """A hundred small launches, each started before the one in front has ended."""
    problems = [Problem(kernels.device, n, 512, exact=False) for n in (64, 200, 1000, 520)] * 25
    chain = Chain(kernels, problems, problems[0].normal_x(7), shared=True)
    assert chain.launches() == [1] * 100
    assert_every_bit(chain, turns=20)


@pytest.mark.parametrize("m", ROWS)
def test_a_recorded_chain_is_launched_as_often_as_wanted(kernels: RecordingKernels, m: int) -> None:
    problems = block_of(kernels, Form(group_size=32))
    chain = Chain(kernels, problems, small_x(problems, m))
    with chain.recorded() as handle:
        for turn in range(30):
            if turn % 10 == 0:
                chain.x.copy_(small_x(problems, m))
                expected = chain.one_by_one()
            chain.spoil()
            chain.replay(handle)
            for y, right in zip(chain.ys, expected, strict=True):
                assert_same(y, right)


@pytest.mark.parametrize("group_size", [128, 32])
def test_events_are_recorded_around_all(kernels: RecordingKernels, group_size: int) -> None:
    problems = block_of(kernels, Form(group_size=group_size))
    chain = Chain(kernels, problems, small_x(problems, 1))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for event in events:
        event.record()
    launch = chain.launch()
    launch.start_event, launch.stop_event = (event.cuda_event for event in events)
    chain.call()
    torch.cuda.synchronize()
    library = kernels.library
    assert library.ql_cuda_linear_chain(chain.params, None, len(chain.params), launch) == 0
    torch.cuda.synchronize()
    assert 1e-3 < events[0].elapsed_time(events[1]) < 10


def test_plans_are_each_layers_own(kernels: RecordingKernels) -> None:
    problems = block_of(kernels, Form())
    chain = Chain(kernels, problems, small_x(problems, 9))
    plans = []
    for problem in problems:
        status, plan = plan_of(kernels, problem, 9, flags=CudaFlag.BATCH_INVARIANT)
        assert status == 0
        plans.append(plan)
    pointers = (ctypes.POINTER(CudaPlan) * len(plans))(*map(ctypes.pointer, plans))
    for params, plan in zip(chain.params, plans, strict=True):
        launch = chain.launch()
        launch.plan = ctypes.pointer(plan)
        assert kernels.library.ql_cuda_linear(params, launch) == 0
    expected = chain.results()
    chain.spoil()
    library, count = kernels.library, len(plans)
    assert library.ql_cuda_linear_chain(chain.params, pointers, count, chain.launch()) == 0
    for y, right in zip(chain.ys, expected, strict=True):
        assert_same(y, right)


@pytest.mark.parametrize("shapes", [BLOCK, UNEVEN], ids=["block", "uneven"])
def test_what_cannot_be_a_chain_is_refused(
    kernels: RecordingKernels, shapes: tuple[tuple[int, int], ...]
) -> None:
    problems = block_of(kernels, Form(), shapes)
    chain = Chain(kernels, problems, small_x(problems, 2))
    library, handle = kernels.library, ctypes.c_void_p()
    for count in (0, -1, 257):
        status = library.ql_cuda_linear_chain(chain.params, None, count, chain.launch())
        assert status == Status.BAD_SHAPE
    assert library.ql_cuda_linear_chain(None, None, 1, chain.launch()) == Status.NULL_POINTER
    assert library.ql_cuda_launch_chain(None, chain.launch()) == Status.NULL_POINTER
    launch = chain.launch()
    launch.plan = ctypes.pointer(plan_of(kernels, problems[0], 2)[1])
    assert library.ql_cuda_linear_chain(chain.params, None, 4, launch) == Status.BAD_PLAN
    library.ql_cuda_free_chain(None)
    # A layer that cannot be launched ends the recording, too: the stream works on.
    chain.call()
    expected = chain.results()
    torch.cuda.synchronize()  # another stream writes there next
    chain.params[2].bits = 5
    with torch.cuda.stream(torch.cuda.Stream(kernels.device)):
        status = library.ql_cuda_record_chain(
            chain.params, None, 4, chain.launch(), ctypes.byref(handle)
        )
        assert status == Status.BAD_BITS
        assert not handle
        chain.params[2].bits = 4
        chain.spoil()
        torch.cuda.synchronize()
        chain.call()
        torch.cuda.synchronize()
    for y, right in zip(chain.ys, expected, strict=True):
        assert_same(y, right)


def test_rows_of_other_dtypes(kernels: RecordingKernels) -> None:
    """bfloat16 through all layers, whose scales are float16."""
    problems = block_of(kernels, Form())
    chain = Chain(kernels, problems, small_x(problems, 5, torch.bfloat16))
    assert chain.launches() == [1, 1, 1, 1]
    assert chain.params[0].x_dtype == DType.BF16
    assert_every_bit(chain, turns=5)
