"""Layers of the same calls as one on a GPU: one gather, one chain of products, one copy out."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_gpu import open_gates
from gpu_bench import rows
from measured_layers import scrape, value
from together_bench import (
    BF16,
    DENSE,
    LAYERS,
    LONGER,
    ORDERED,
    ORDERED_TOO,
    OTHER_ORDER,
    SMALL,
    WIDE,
    Bench,
    Q,
    check,
    layers_of,
)  # fmt: skip

from qlinear_service.batching import Batch, Part
from qlinear_service.dtypes import DType
from qlinear_service.errors import EngineFailure, EngineLost, Unavailable
from qlinear_service.gpu import together
from qlinear_service.gpu.ways import PINNED, SLAB, TABLE_ROWS


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.end()


async def test_layers_of_a_call_are_one_trip(bench: Bench) -> None:
    x = rows(1, 3)
    names = (Q, WIDE, SMALL)
    for output in (DType.F16, DType.F32):
        for name, outcome in zip(names, await bench.call(x, *names, output=output), strict=True):
            check(outcome, x, name, output)
    assert layers_of(bench.gpu) == [["q", "wide", "small"]] * 2
    assert [bench.gpu.count(step) for step in ("copy_in", "kernel", "copy_out")] == [2, 2, 2]
    assert all(trip.way == together.TOGETHER for trip in bench.gpu.trips)
    assert bench.slab.used_bytes == 0


async def test_calls_that_ask_for_the_same_layers_are_one_trip(bench: Bench) -> None:
    """Each part of each layer's results goes to its own call."""
    bench.gpu.gates["kernel"].clear()
    busy = [bench.call(rows(1), Q)]
    await bench.reached("copy_in", 1)
    busy.append(bench.call(rows(2), Q))
    await bench.reached("copy_in", 2)
    names = (ORDERED, ORDERED_TOO)
    calls = [(rows(seed, seed), bench.call(rows(seed, seed), *names)) for seed in (3, 1, 5)]
    await asyncio.sleep(0)
    open_gates(bench.gpu)
    for x, told in calls:
        for name, outcome in zip(names, await told, strict=True):
            check(outcome, x, name)
            assert outcome.batch_rows == 9
    await asyncio.gather(*busy)
    assert layers_of(bench.gpu) == [["q"], ["q"], ["ordered", "ordered_too"]]
    assert bench.gpu.trips[2].parts[1::2] == [3, 1, 5]


async def test_a_group_has_one_stage_and_one_place_in_flight(bench: Bench) -> None:
    bench.gpu.gates["kernel"].clear()
    told = [bench.call(rows(seed), Q, WIDE, SMALL) for seed in range(2)]
    await bench.reached("copy_in", 1)
    for _ in range(30):
        await asyncio.sleep(0)
    assert bench.engine.stage_count - bench.engine._stages.free == len(bench.gpu.trips)
    open_gates(bench.gpu)
    await asyncio.gather(*told)
    assert {tuple(names) for names in layers_of(bench.gpu)} == {("q", "wide", "small")}


async def test_times_are_shared_out_by_bytes_and_copies_are_counted_once(bench: Bench) -> None:
    names = (Q, WIDE, SMALL)
    outcomes = await bench.call(rows(1), *names)
    took = [outcome.kernel_nanoseconds for outcome in outcomes]
    nbytes = [LAYERS[name].streamed_bytes for name in names]
    assert sum(took) == 5000, "what the pair of events around all of them has measured"
    for nanoseconds, mine in zip(took, nbytes, strict=True):
        assert abs(nanoseconds - 5000 * mine / sum(nbytes)) <= 1
    samples = scrape(bench.metrics)
    for direction in ("gather", "to_device", "from_device", "scatter"):
        assert value(samples, "qlinear_transfer_seconds_count", direction=direction) == 1
    for name in names:
        labels = {"shape": LAYERS[name].spec.shape, "m": "1", "device": "cuda:0"}
        assert value(samples, "qlinear_kernel_seconds_count", **labels) == 1
    assert sum(live.launches for live in bench.metrics.live()) == 3, "computations"
    busy = sum(live.busy_seconds for live in bench.metrics.live())
    assert busy == pytest.approx(5e-6)


def may(bench: Bench, *names: str, rows_of: int = 2, **more: Any) -> bool:
    return bench.engine.goes_together(bench.batches(rows(1, rows_of), *names, **more))


async def test_what_goes_together(bench: Bench) -> None:
    assert may(bench, Q, WIDE, SMALL)
    assert may(bench, Q, Q)
    assert may(bench, ORDERED, ORDERED_TOO), "the same order in tensors of their own"
    assert not may(bench, Q), "there is nothing to share"
    assert not may(bench, Q, ORDERED)
    assert not may(bench, ORDERED, OTHER_ORDER)
    assert not may(bench, Q, BF16), "float32 would be rounded in two ways"
    assert not may(bench, Q, DENSE)
    assert not may(bench, DENSE, DENSE)
    assert not may(bench, Q, LONGER)


async def test_only_batches_of_the_same_rows_go_together(bench: Bench) -> None:
    first, second = bench.batches(rows(1, 4), Q, WIDE)
    assert bench.engine.goes_together([first, second])
    (elsewhere,) = bench.batches(rows(1, 4), WIDE)
    assert not bench.engine.goes_together([first, elsewhere])
    (item, _, _) = second.parts[0]
    halves = (Part(item, 0, 2), Part(item, 2, 2))
    assert not bench.engine.goes_together([first, Batch(second.key, halves, 4)])
    assert not bench.engine.goes_together([first, Batch(second.key, halves[:1], 2)])
    key = second.key._replace(x_dtype=DType.BF16)
    assert not bench.engine.goes_together([first, second._replace(key=key)])
    turned = Batch(first.key, halves[::-1], 4), Batch(second.key, halves, 4)
    assert not bench.engine.goes_together(turned)


async def test_large_results_had_better_not_wait_for_each_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "MOST_RESULT_BYTES", 2 * 2 * (24 + 7))
    assert may(bench, Q, SMALL)
    assert not may(bench, Q, SMALL, rows_of=3)
    assert not may(bench, Q, SMALL, output=DType.F32)
    monkeypatch.undo()
    assert may(bench, Q, SMALL, rows_of=TABLE_ROWS)
    assert not may(bench, Q, SMALL, rows_of=TABLE_ROWS + 1), "these come in copies"


async def test_rows_that_no_kernel_can_gather_do_not_go_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.engine._companions, "_can_gather", lambda layer: False)
    assert not may(bench, Q, WIDE)


async def test_results_are_never_written_over_what_other_layers_read(bench: Bench) -> None:
    """Whoever else the slot has: with one user left a batch of its own would."""
    x = rows(1, 2)
    batches = bench.batches(x, Q, SMALL)
    slot = batches[0].parts[0].item.slot
    bench.slab.release(slot)
    before = bytes(bench.slab.view(slot))
    results = await bench.engine.run_together(batches)
    assert bench.gpu.trips[-1].way == together.TOGETHER
    assert bytes(bench.slab.view(slot)) == before
    assert not any(result.in_slots for result in results)
    assert (await bench.engine.run(batches[1])).in_slots


async def test_without_kernels_in_the_slab_nothing_goes_together() -> None:
    for bench in (Bench(mode=PINNED), Bench(mode=SLAB)):
        if bench.engine._mode == SLAB:
            assert may(bench, Q, WIDE)
        else:
            assert not may(bench, Q, WIDE)
            outcomes = await bench.call(rows(1), Q, WIDE)
            check(outcomes[1], rows(1), WIDE)
            assert layers_of(bench.gpu) == [["q"], ["wide"]]
        await bench.end()


async def test_what_does_not_go_together_follows_as_before(bench: Bench) -> None:
    for names in ((Q, ORDERED), (Q, DENSE, WIDE)):
        bench.gpu.trips.clear()
        for name, outcome in zip(names, await bench.call(rows(3), *names), strict=True):
            check(outcome, rows(3), name)
        assert all(len(trip.products) == 1 for trip in bench.gpu.trips)
        assert len(bench.gpu.trips) == len(names)


@pytest.mark.parametrize("when", ["launched", "computed"])
async def test_of_what_fails_together_each_layer_of_each_call_is_tried_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """Of two calls for two layers one is bad: it alone has no answer."""
    bad = rows(1)
    bad[0, 0] = 13
    if when == "computed":
        bench.gpu.faults = lambda x: "launch failed" if (x == 13).any() else ""
    else:
        bench.gpu.refuses = lambda count: "no room" if count > 1 else ""
    calls = [bench.call(x, Q, WIDE) for x in (rows(2), bad, rows(3))]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for place, x in ((0, rows(2)), (2, rows(3))):
        for name, outcome in zip((Q, WIDE), outcomes[place], strict=True):
            check(outcome, x, name)
    if when == "computed":
        assert isinstance(outcomes[1], EngineFailure)
    else:
        check(outcomes[1][1], bad, WIDE)
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    told = 'batch_failed layer="test/q, test/wide" requests=3 rows=3 action=retry_one_by_one'
    assert told in warned[0].getMessage()
    found = layers_of(bench.gpu)
    assert found[0] == ["q", "wide"]
    assert all(len(names) == 1 for names in found[1:])
    assert bench.slab.used_bytes == 0
    bench.gpu.faults, bench.gpu.refuses = (lambda x: ""), (lambda count: "")
    check((await bench.call(rows(4), Q, WIDE))[1], rows(4), WIDE)
    assert layers_of(bench.gpu)[-1] == ["q", "wide"]


async def test_a_lost_device_ends_all_calls_of_a_group(bench: Bench) -> None:
    bench.gpu.gates["kernel"].clear()
    told = [bench.call(rows(seed), Q, WIDE, SMALL) for seed in range(4)]
    await bench.reached("kernel begins", 1)
    bench.gpu.lost = True
    open_gates(bench.gpu)
    with pytest.raises(EngineLost, match="illegal memory access"):
        await bench.task
    for outcome in await asyncio.gather(*told, return_exceptions=True):
        assert isinstance(outcome, Unavailable)
    assert bench.batcher.items_held == 0
    with pytest.raises(EngineLost):
        await bench.engine.run_together(bench.batches(rows(1), Q, WIDE))


async def test_a_group_goes_whole_to_the_device_with_the_fewest() -> None:
    bench = Bench(count=2)
    for gpu in bench.gpus:
        gpu.gates["kernel"].clear()
    told = []
    for seed in range(4):
        told.append((rows(seed, 2), bench.call(rows(seed, 2), Q, WIDE)))
        for _ in range(30):
            await asyncio.sleep(0)
    for gpu in bench.gpus:
        open_gates(gpu)
    for x, call in told:
        for name, outcome in zip((Q, WIDE), await call, strict=True):
            check(outcome, x, name)
    assert [layers_of(gpu) for gpu in bench.gpus] == [[["q", "wide"]] * 2] * 2
    samples = scrape(bench.metrics)
    for name in bench.engines:
        for layer in (Q, WIDE):
            labels = {"shape": LAYERS[layer].spec.shape, "m": "8", "device": name}
            assert value(samples, "qlinear_kernel_seconds_count", **labels) == 2
    await bench.end()


async def test_calls_of_many_kinds_are_never_mixed_up(bench: Bench) -> None:
    kinds = [
        (Q, WIDE, SMALL),
        (ORDERED, ORDERED_TOO),
        (Q,),
        (Q, ORDERED),
        (SMALL, DENSE, Q, WIDE, Q),
    ]

    async def caller(number: int) -> None:
        x, names = rows(number, 1 + number % 7), kinds[number // 10 % len(kinds)]
        for name, outcome in zip(names, await bench.call(x, *names), strict=True):
            check(outcome, x, name)

    for start in range(0, 200, 20):
        await asyncio.gather(*map(caller, range(start, start + 20)))
    assert bench.batcher.items_held == 0
    assert bench.slab.used_bytes == 0
    assert max(len(trip.products) for trip in bench.gpu.trips) == 3
