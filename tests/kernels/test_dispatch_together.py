"""Layers of the same calls that the native dispatcher leaves to the host: computed as one there."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from dispatch_bench import (
    DENSE_NAME,
    ORDERED_NAME,
    PLAIN_NAME,
    SECOND_NAME,
    DispatchBench,
    Make,
    check,
    rows,
)

from qlinear_service.dispatch.abi import Kind
from qlinear_service.dispatch.native import Ended
from qlinear_service.errors import EngineFailure

NAMES = (PLAIN_NAME, SECOND_NAME)


def counts(bench: DispatchBench) -> tuple[int, int]:
    """Return how often rows were gathered, and chains launched."""
    return int(bench.library.fake_row_gathers()), int(bench.library.fake_chains())


def heads_of(bench: DispatchBench) -> list[tuple[int, bool]]:
    """Return, from now on, the layer of each batch that is left to the host, and what it says."""
    heads: list[tuple[int, bool]] = []
    take = bench.batcher._take

    def noted(ended: Ended) -> None:
        if ended.kind == Kind.BATCH_HOST:
            heads.append((ended.layer, bool(ended.is_last)))
        take(ended)

    bench.batcher._take = noted  # type: ignore[method-assign]
    return heads


@pytest.mark.parametrize("spins", [False, True])
async def test_layers_of_a_call_are_one_chain(make: Make, spins: bool) -> None:
    bench = make(spins=spins)
    heads = heads_of(bench)
    before = counts(bench)[1]
    for seed in range(5):
        x = rows(seed, 1 + seed)
        for name, outcome in zip(NAMES, await bench.call(x, *NAMES), strict=True):
            check(outcome, x, name)
    assert counts(bench) == (5, before + 5)
    assert heads == [(0, False), (3, True)] * 5
    await bench.all_left()
    assert bench.slab.used_bytes == 0
    assert not any(bench.batching.queue_rows().values())


async def test_calls_that_wait_together_are_one_chain(make: Make) -> None:
    bench = make(max_batches_in_flight=1)
    bench.library.fake_hang(1)
    first = bench.call(rows(0))
    calls = [(rows(seed, 2), bench.call(rows(seed, 2), *NAMES)) for seed in range(1, 6)]
    await asyncio.sleep(0.02)
    before = counts(bench)
    bench.library.fake_hang(0)
    check((await first)[0], rows(0), PLAIN_NAME)
    for x, told in calls:
        for name, outcome in zip(NAMES, await told, strict=True):
            check(outcome, x, name)
            assert outcome.batch_rows == 10
    assert counts(bench) == (before[0] + 1, before[1] + 1)
    await bench.all_left()


async def test_a_group_takes_one_place_among_those_that_may_run(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(max_batch_rows=1, max_batches_in_flight=3)
    runs: Any = bench.batcher._runs  # type: ignore[attr-defined]
    run, now, most = runs._together.run_together, 0, 0

    async def counted(batches: Any) -> Any:
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            return await run(batches)
        finally:
            now -= 1

    monkeypatch.setattr(runs._together, "run_together", counted)
    bench.library.fake_hang(1)
    told = [bench.call(rows(seed), *NAMES) for seed in range(6)]
    await asyncio.sleep(0.1)
    assert (now, most) == (3, 3)
    bench.library.fake_hang(0)
    for seed, one in enumerate(told):
        for name, outcome in zip(NAMES, await one, strict=True):
            check(outcome, rows(seed), name)
    assert most == 3
    await bench.all_left()


async def test_what_does_not_go_together_is_computed_as_before(make: Make) -> None:
    bench = make()
    heads, before = heads_of(bench), counts(bench)[1]
    names = (PLAIN_NAME, ORDERED_NAME, DENSE_NAME)
    for name, outcome in zip(names, await bench.call(rows(1, 3), *names), strict=True):
        check(outcome, rows(1, 3), name)
    assert heads == [(0, False), (1, False), (2, True)]
    check((await bench.call(rows(2, 3), DENSE_NAME))[0], rows(2, 3), DENSE_NAME)
    assert heads[3:] == [(2, True)], "it has nobody behind it"
    assert counts(bench)[1] == before


async def test_each_layer_of_each_call_is_tried_alone_after_a_failure(make: Make) -> None:
    bench = make(max_batches_in_flight=1)
    bench.library.fake_hang(1)
    first = bench.call(rows(0))
    calls = [bench.call(rows(seed), *NAMES) for seed in (1, 2, 3)]
    await asyncio.sleep(0.02)
    bench.library.fake_fail(2)  # the chain, and the first layer of the first call
    bench.library.fake_hang(0)
    await first
    with pytest.raises(EngineFailure):
        await calls[0]
    for seed, told in zip((2, 3), calls[1:], strict=True):
        for name, outcome in zip(NAMES, await told, strict=True):
            check(outcome, rows(seed), name)
            assert outcome.batch_rows == 1
    await bench.all_left()
    assert bench.slab.used_bytes == 0
    before = counts(bench)[1]
    check((await bench.call(rows(4), *NAMES))[1], rows(4), SECOND_NAME)
    assert counts(bench)[1] == before + 1


async def test_after_a_failure_of_its_own_batches_are_the_hosts_and_not_mixed_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that the dispatcher could send follows no other layer when it is the host's."""
    bench = make()
    heads = heads_of(bench)
    mended = asyncio.Event()
    engine: Any = bench.batcher._engine
    recover = engine.recover

    async def held(error: BaseException) -> None:
        await mended.wait()
        await recover(error)

    monkeypatch.setattr(engine, "recover", held)
    bench.library.fake_fail(1)
    failed = bench.call(rows(0))
    await asyncio.sleep(0.02)
    told = [bench.call(rows(1)), bench.call(rows(2), SECOND_NAME)]
    both = bench.call(rows(3), *NAMES)
    await asyncio.sleep(0.02)
    assert heads, "nothing is sent to a device that nobody has looked at"
    mended.set()
    with pytest.raises(EngineFailure):
        await failed
    check((await told[0])[0], rows(1), PLAIN_NAME)
    check((await told[1])[0], rows(2), SECOND_NAME)
    for name, outcome in zip(NAMES, await both, strict=True):
        check(outcome, rows(3), name)
    assert [is_last for _, is_last in heads].count(False) <= 1
    await bench.all_left()


async def test_many_clients_of_many_kinds_are_never_mixed_up(make: Make) -> None:
    bench = make(max_batch_rows=16, spins=True)
    kinds = [NAMES, (PLAIN_NAME,), NAMES[::-1], (PLAIN_NAME, ORDERED_NAME, SECOND_NAME), NAMES]

    async def client(number: int) -> None:
        for turn in range(20):
            seed = 1000 * number + turn
            # At first all ask for the same layers, and the first of them is alone.
            is_mixed = turn >= 5
            x = rows(seed, 1 + seed % 5 + 40 * (is_mixed and seed % 17 == 0))
            names = kinds[(number + turn // 5) % len(kinds)] if is_mixed else NAMES
            items = bench.items(x, names, client=f"client {number % 3}")
            told = bench.submit(items)
            if seed % 7 == 0:
                await asyncio.sleep(0)
                bench.batcher.cancel(items)
                continue
            for name, outcome in zip(names, await told, strict=True):
                check(outcome, x, name)

    before = counts(bench)[1]
    await asyncio.gather(*map(client, range(16)))
    await bench.all_left()
    assert counts(bench)[1] > before
    assert bench.slab.used_bytes == 0
