"""Chains of one launch beside other launches: all of their thread blocks must run at once."""

import time
from collections.abc import Sequence

import pytest
import torch
from gpu.chains import Chain, block_of, form_of, skip_unless_even, small_x
from gpu.loading import RecordingKernels
from gpu.problems import Problem, assert_same
from gpu.running import rounded

from qlinear_service.dtypes import DType

HANG_SECONDS = 30.0


@pytest.fixture(autouse=True)
def _hopper(kernels: RecordingKernels) -> None:
    skip_unless_even(kernels)


def finish(streams: Sequence[torch.cuda.Stream]) -> None:
    """Wait for streams, and fail where torch would wait for ever."""
    ends = [stream.record_event() for stream in streams]
    deadline = time.monotonic() + HANG_SECONDS
    while not all(end.query() for end in ends):
        assert time.monotonic() < deadline, "launches of two streams wait for each other"
        time.sleep(0.001)


@pytest.mark.parametrize("recorded", [False, True], ids=["called", "recorded"])
def test_two_streams_at_the_same_time(kernels: RecordingKernels, recorded: bool) -> None:
    """All thread blocks of a launch must run at once: two launches must not have half each."""
    problems = block_of(kernels, form_of(torch.float16))
    chains = [Chain(kernels, problems, small_x(problems, m)) for m in (1, 16)]
    for chain in chains:
        chain.call()
    expected = [chain.results() for chain in chains]
    for chain in chains:
        chain.spoil()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(kernels.device) for _ in chains]
    with chains[0].recorded() as first, chains[1].recorded() as second:
        for _ in range(300):
            for chain, stream, handle in zip(chains, streams, (first, second), strict=True):
                with torch.cuda.stream(stream):
                    if recorded:
                        chain.replay(handle)
                    else:
                        chain.call()
        finish(streams)
    for chain, right in zip(chains, expected, strict=True):
        for y, one in zip(chain.ys, right, strict=True):
            assert_same(y, one)
        chain.assert_settled()


def test_beside_other_kernels(kernels: RecordingKernels) -> None:
    """Single products on another stream take multiprocessors, and give them back."""
    problems = block_of(kernels, form_of(torch.float16))
    chain = Chain(kernels, problems, small_x(problems, 8))
    other = Problem(kernels.device, 4096, 4096)
    x = other.x(8)
    right = rounded(other.product(x), torch.float16)
    chain.call()
    expected = chain.results()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(kernels.device) for _ in range(2)]
    for _ in range(300):
        with torch.cuda.stream(streams[0]):
            chain.call()
        with torch.cuda.stream(streams[1]):
            y = kernels.linear(other.layer, x, DType.F16)
    finish(streams)
    assert_same(y, right)
    for got, one in zip(chain.ys, expected, strict=True):
        assert_same(got, one)
