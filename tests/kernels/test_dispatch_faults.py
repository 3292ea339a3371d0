"""The native dispatcher when things go wrong: launches, devices, batches that do not end."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from dispatch_bench import PLAIN_NAME, DispatchBench, Make, Told, check, rows

from qlinear_service.dispatch import batcher as dispatch_batcher
from qlinear_service.errors import EngineFailure, EngineLost, Unavailable


async def batch_of(bench: DispatchBench, count: int) -> list[Told]:
    """Return calls that are one batch, which is not on its way yet, behind one that runs."""
    bench.library.fake_hang(1)
    first = bench.call(rows(0))
    calls = [bench.call(rows(seed)) for seed in range(1, count + 1)]
    while bench.library.fake_row_gathers() < 1:
        await asyncio.sleep(0.001)
    return [first, *calls]


async def works(bench: DispatchBench) -> None:
    """Nothing is left of a fault."""
    before = bench.library.fake_row_gathers()
    for seed in range(50, 55):
        check((await bench.call(rows(seed)))[0], rows(seed), PLAIN_NAME)
    assert bench.library.fake_row_gathers() == before + 5
    await bench.all_left()
    assert bench.slab.used_bytes == 0


async def test_a_launch_that_fails_fails_a_lone_call_and_the_next_is_sent_again(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.library.fake_fail(1)
    with pytest.raises(EngineFailure):
        await bench.call(rows(1))
    assert "pretended failure" in caplog.text
    await works(bench)


async def test_of_a_batch_that_fails_each_call_is_tried_alone(make: Make) -> None:
    bench = make(max_batches_in_flight=1)
    first, *calls = await batch_of(bench, 4)
    bench.library.fake_fail(2)  # the batch, and the first of its calls
    bench.library.fake_hang(0)
    check((await first)[0], rows(0), PLAIN_NAME)
    with pytest.raises(EngineFailure):
        await calls[0]
    for seed, told in enumerate(calls[1:], start=2):
        (outcome,) = await told
        check(outcome, rows(seed), PLAIN_NAME)
        assert outcome.batch_rows == 1
    await works(bench)


async def test_a_plan_that_is_refused_is_left_out(make: Make) -> None:
    bench = make()
    bench.library.fake_refuse_plans(1)
    check((await bench.call(rows(1)))[0], rows(1), PLAIN_NAME)
    await works(bench)


async def test_a_batch_whose_results_may_lie_over_its_activations_is_not_tried_again(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(max_batches_in_flight=1)
    told = await batch_of(bench, 3)
    bench.library.fake_fail_waits(1)
    before = bench.library.fake_launches()
    bench.library.fake_hang(0)
    with pytest.raises(EngineFailure):
        await told[0]
    await asyncio.gather(*told[1:])
    assert bench.library.fake_launches() == before + 1, "those behind it, and nothing twice"
    assert "results may lie where activations did" in caplog.text
    await works(bench)


async def test_while_a_failed_batch_is_seen_to_nothing_is_sent(make: Make) -> None:
    bench = make()
    went_on = asyncio.Event()
    recover = bench.batcher._engine.recover

    async def slowly(error: BaseException) -> None:
        await went_on.wait()
        await recover(error)

    bench.batcher._engine.recover = slowly  # type: ignore[method-assign]
    bench.library.fake_fail(1)
    failed = bench.call(rows(1))
    await asyncio.sleep(0.02)
    gathers = bench.library.fake_row_gathers()
    ran = []
    run = bench.batcher._engine._engine.run  # type: ignore[attr-defined]

    async def noted(batch: object) -> object:
        ran.append(batch)
        return await run(batch)

    bench.batcher._engine._engine.run = noted  # type: ignore[attr-defined]
    check((await bench.call(rows(2)))[0], rows(2), PLAIN_NAME)
    assert (len(ran), bench.library.fake_row_gathers() >= gathers) == (1, True)
    went_on.set()
    with pytest.raises(EngineFailure):
        await failed
    await bench.all_left()
    await works(bench)
    assert len(ran) == 1


async def test_a_lost_device_ends_all_calls_and_the_loop(make: Make) -> None:
    bench = make()
    bench.library.fake_lose()
    calls = [bench.call(rows(seed)) for seed in range(5)]
    for told in calls:
        with pytest.raises(Unavailable, match="lost its device"):
            await told
    with pytest.raises(EngineLost, match="is lost"):
        await asyncio.wait_for(bench.task, 10)


@pytest.mark.parametrize("spins", [False, True])
async def test_a_batch_that_does_not_end_is_a_lost_engine(
    make: Make, caplog: pytest.LogCaptureFixture, spins: bool
) -> None:
    bench = make(max_batch_seconds=0.2, spins=spins)
    check((await bench.call(rows(9)))[0], rows(9), PLAIN_NAME)
    bench.library.fake_hang(1)
    calls = [bench.call(rows(seed)) for seed in range(5)]
    for told in calls:
        with pytest.raises(Unavailable, match="lost its device"):
            await told
    with pytest.raises(EngineLost, match="does not end"):
        await asyncio.wait_for(bench.task, 10)
    assert "engine_wedged" in caplog.text
    assert 1 in bench.released
    assert len(bench.released) < 6, "the device may still touch some"
    assert not bench.batching.stop(0.05), "its thread waits for the device"


async def test_a_bug_while_settling_ends_all_calls(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()

    def broken(self: object, group: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(dispatch_batcher.DispatchBatcher, "_finish", broken)
    told = bench.call(rows(1))
    with pytest.raises(Unavailable):
        await told
    with pytest.raises(LookupError, match="a bug"):
        await asyncio.wait_for(bench.task, 10)
    assert "dispatcher_broken" in caplog.text
