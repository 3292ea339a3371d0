"""Which of two streams the products of the native dispatcher take, and what they wait for there."""

import asyncio
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from dispatch_bench import (
    DENSE_NAME,
    PLAIN_NAME,
    DispatchBench,
    Make,
    check,
    rows,
)
from fake_cuda import HostKernels

from qlinear_service.errors import EngineFailure
from qlinear_service.gpu import direct
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.kernels.cuda_abi import CudaBatch

FLIGHT = 12


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "LANES", 2)
    monkeypatch.setattr(direct, "TIMED_EACH", 4)


class Sent(NamedTuple):
    """One batch as it was sent."""

    lane: int
    is_timed: bool
    after: int | None
    """Which one before it its product waits for."""
    workspace: int


def streams_of(bench: DispatchBench) -> CudaStreams:
    engine: Any = bench.batcher._engine
    streams: CudaStreams = engine._streams
    return streams


def sent(bench: DispatchBench) -> list[Sent]:
    """Return what has been sent since the start; an event is that of its latest batch."""
    batches = (CudaBatch * 256)()
    streams = streams_of(bench)
    lanes = [streams.in_order[1].cuda_stream]
    if streams._second is not None:
        lanes.append(streams._second.cuda_stream)
    found: list[Sent] = []
    recorded: dict[int, int] = {}
    for place in range(bench.library.fake_batches(batches)):
        batch = batches[place]
        after = None if batch.after is None else recorded[batch.after]
        lane = lanes.index(batch.launch.stream)
        found.append(Sent(lane, batch.in_start is not None, after, batch.launch.workspace))
        recorded[batch.launch.stop_event] = place
    return found


async def arrive(bench: DispatchBench, count: int) -> None:
    """Wait until so many batches have been sent since the start."""
    while bench.library.fake_batches((CudaBatch * 256)()) < count:
        await asyncio.sleep(0.001)


async def fly(bench: DispatchBench, count: int = FLIGHT) -> list[Sent]:
    """Send one call that is awaited and then many at once; return how the latter were sent."""
    await bench.call(rows(0))
    before = len(sent(bench))
    bench.library.fake_hang(1)
    told = [bench.call(rows(1))]
    await arrive(bench, before + 1)  # alone
    told += [bench.call(rows(1 + seed)) for seed in range(1, count)]
    await arrive(bench, before + count)
    bench.library.fake_hang(0)
    for seed, one in enumerate(told):
        check((await one)[0], rows(1 + seed), PLAIN_NAME)
    await bench.all_left()
    found = sent(bench)[before:]
    return [one._replace(after=None if one.after is None else one.after - before) for one in found]


@pytest.mark.usefixtures("two")
async def test_products_take_turns_and_one_that_is_timed_is_beside_none(make: Make) -> None:
    bench = make(max_batch_rows=1, max_batches_in_flight=FLIGHT)
    found = await fly(bench)
    assert [(one.lane, one.is_timed, one.after) for one in found] == [
        (0, True, None),  # alone
        *((1, False, 0), (0, False, None), (1, False, None)),
        (0, True, 3),
        *((1, False, 4), (0, False, None), (1, False, None)),
        (0, True, 7),
        *((1, False, 8), (0, False, None), (1, False, None)),
    ]
    assert len({one.workspace for one in found}) == 2
    assert len({(one.lane, one.workspace) for one in found}) == 2, "each has its own"
    # The last one of the second lane was waited for, if long after its end.
    assert [(one.lane, one.after) for one in (await fly(bench, 1))] == [(0, None)]


@pytest.mark.parametrize("invariant", [False, True])
async def test_if_told_so_and_in_batch_invariant_mode_there_is_one_lane(
    make: Make,
    kernels: HostKernels,
    monkeypatch: pytest.MonkeyPatch,
    invariant: bool,
) -> None:
    monkeypatch.setattr(direct, "TIMED_EACH", 4)
    monkeypatch.setattr(kernels, "batch_invariant", invariant)
    monkeypatch.setattr(direct, "LANES", 2 if invariant else 1)
    bench = make(max_batch_rows=1, max_batches_in_flight=FLIGHT)
    found = await fly(bench)
    assert {(one.lane, one.after) for one in found} == {(0, None)}
    assert streams_of(bench)._second is None


@pytest.mark.usefixtures("two")
async def test_beside_what_the_host_computes_there_is_one_lane(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(max_batch_rows=1, max_batches_in_flight=FLIGHT)
    streams: Any = streams_of(bench)
    waiting, go_on = asyncio.Event(), asyncio.Event()
    engine: Any = bench.batcher._engine
    run = engine._engine.run

    async def held(batch: object) -> object:
        waiting.set()
        await go_on.wait()
        return await run(batch)

    monkeypatch.setattr(engine._engine, "run", held)
    await bench.call(rows(0))
    bench.library.fake_hang(1)
    told = [bench.call(rows(0))]
    await arrive(bench, 2)
    told += [bench.call(rows(seed)) for seed in range(1, 3)]
    await arrive(bench, 4)
    dense = bench.call(rows(9), DENSE_NAME)
    await waiting.wait()
    told += [bench.call(rows(seed)) for seed in range(3, 6)]
    await arrive(bench, 7)
    found = [(one.lane, one.is_timed, one.after) for one in sent(bench)[1:]]
    assert found[:3] == [(0, True, None), (1, False, 1), (0, False, None)]
    # The first waits for all of the second lane, the others lie behind it.
    assert found[3:] == [(0, False, 2), (0, True, None), (0, False, None)]
    bench.library.fake_hang(0)
    streams._compute.waited.clear()
    go_on.set()
    check((await dense)[0], rows(9), DENSE_NAME)
    assert streams._compute.waited[0] is streams._second_done, "the host's product waits, too"
    for seed, one in enumerate(told):
        check((await one)[0], rows(seed), PLAIN_NAME)
    await bench.all_left()
    assert 1 in {one.lane for one in await fly(bench)}, "and then there are two again"


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("lane", [0, 1])
async def test_after_a_failure_both_workspaces_are_cleared(
    make: Make,
    kernels: HostKernels,
    lane: int,
) -> None:
    bench = make(max_batch_rows=1, max_batches_in_flight=FLIGHT)
    await bench.call(rows(0))
    streams = streams_of(bench)
    workspaces = [kernels.runtime._streams[one.cuda_stream][1] for one in streams._lanes()]
    assert len(workspaces) == 2
    bench.library.fake_hang(1)
    told = []
    for seed in range(1 + lane):
        told.append(bench.call(rows(seed)))
        await arrive(bench, 2 + seed)
    for workspace in workspaces:
        workspace.fill_(1)
    bench.library.fake_fail(1)
    told.append(bench.call(rows(5)))
    await arrive(bench, 3 + lane)
    assert sent(bench)[2 + lane].lane == 1 - lane
    bench.library.fake_hang(0)
    with pytest.raises(EngineFailure):
        await told[-1]
    for seed, one in enumerate(told[:-1]):
        check((await one)[0], rows(seed), PLAIN_NAME)
    await bench.all_left()
    assert not any(workspace.any() for workspace in workspaces)
    await fly(bench)


async def test_the_second_lane_is_settled_and_made_once(kernels: HostKernels) -> None:
    streams = CudaStreams(kernels)
    streams.settle()
    second: Any = streams.second_lane()
    assert streams.second_lane() is second
    assert second.cuda_stream not in {stream.cuda_stream for stream in streams.in_order}
    second.fault = RuntimeError("it was not waited for")
    with pytest.raises(RuntimeError, match="it was not waited for"):
        streams.settle()
    second.fault = None
    streams.settle()


async def test_a_device_with_one_lane_waits_for_nothing_more(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "LANES", 1)
    bench = make()
    streams: Any = streams_of(bench)
    streams._compute.waited.clear()
    x = torch.randn(1, 40).half()
    check((await bench.call(x, DENSE_NAME))[0], x, DENSE_NAME)
    assert streams._second_done not in streams._compute.waited
    assert streams._compute.waited, "but for its rows"
