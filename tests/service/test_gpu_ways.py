"""Rows that kernels take from the slab and put into it: the rule, slots, lone batches, faults."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
import torch
from fake_gpu import open_gates
from gpu_bench import LAYER, NAME, ORDERED, QUICK, K, MakeBench, N, batch_of, benches, check, rows

from qlinear_service.batching import Part
from qlinear_service.dtypes import DType
from qlinear_service.errors import ActivationsGone, EngineFailure
from qlinear_service.gpu import engine as gpu_engine
from qlinear_service.gpu.ways import AUTO, PINNED, SLAB, TABLE_ROWS, Batched, Way, way_of
from qlinear_service.kernels import reference
from qlinear_service.roofline import Roofline
from qlinear_service.work import Batch


@pytest.fixture
async def new_bench() -> AsyncIterator[MakeBench]:
    async with benches() as make:
        yield make


def batched(
    rows: int = 1, y_bytes: int = 1, *, gather: bool = True, scatter: bool = True
) -> Batched:
    return Batched(rows, y_bytes, can_gather=gather, can_scatter=lambda: scatter)


def test_the_rule() -> None:
    both, none = Way(gather=True, scatter=True), Way(gather=False, scatter=False)
    assert way_of(batched()) == both
    assert way_of(batched(64, 64 * 57344)) == Way(gather=True, scatter=False)
    assert way_of(batched(32, 32 * 57344)) == way_of(batched(900, 256 << 10)) == both
    assert way_of(batched(64, 64 * 57344), SLAB) == both
    assert way_of(batched(scatter=False)) == Way(gather=True, scatter=False)
    assert way_of(batched(gather=False, scatter=False)) == none
    for mode in (AUTO, SLAB):
        assert way_of(batched(TABLE_ROWS + 1), mode) == none
    assert way_of(batched(), PINNED) == none


@pytest.mark.parametrize("x_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(1,), (7,), (3, 1, 5), (900,), (900, 30), (1,) * 200])
async def test_each_part_gets_its_own_rows_in_its_own_slot(
    new_bench: MakeBench, sizes: tuple[int, ...], x_dtype: torch.dtype
) -> None:
    bench = new_bench()
    xs = [rows(i, size, x_dtype) for i, size in enumerate(sizes)]
    items = [bench.item(x) for x in xs]
    result = await bench.engine.run(batch_of(*items))
    assert result.in_slots
    assert [trip.way for trip in bench.gpu.trips] == [Way(gather=True, scatter=True)]
    expected = reference.linear(LAYER, torch.cat(xs), output_dtype=DType.F16).split(sizes)
    for item, piece, y in zip(items, result.rows, expected, strict=True):
        assert torch.equal(torch.frombuffer(piece, dtype=torch.float16).view(-1, N), y)
        assert bytes(bench.slab.view(item.slot)[: len(piece)]) == bytes(piece)


async def test_answers_outlive_their_slots(new_bench: MakeBench) -> None:
    """The bench overwrites each slot when it is released, and an answer is looked at after that."""
    bench = new_bench()
    outcomes = [(await bench.call(rows(seed, 3)))[0] for seed in range(6)]
    assert len(bench.released) == 6
    for seed, outcome in enumerate(outcomes):
        check(outcome, rows(seed, 3))


async def test_what_others_still_read_is_not_overwritten(new_bench: MakeBench) -> None:
    """One x for two layers: its first result goes another way, its last one may go there."""
    bench = new_bench()
    x = rows(1, 2)
    first, second = bench.item(x), bench.item(x, ORDERED.spec.name)
    bench.slab.release(second.slot)
    bench.slab._records[first.slot.index].users = 2
    second.slot = first.slot
    before = bytes(bench.slab.view(first.slot))
    result = await bench.engine.run(batch_of(first))
    assert not result.in_slots
    assert bytes(bench.slab.view(first.slot)) == before
    bench.slab.release(first.slot)
    assert (await bench.engine.run(batch_of(second))).in_slots


async def test_pieces_of_a_cut_call_leave_the_others_alone(new_bench: MakeBench) -> None:
    bench = new_bench()
    x = rows(1, 10)
    item = bench.item(x)
    y = reference.linear(LAYER, x, output_dtype=DType.F16)
    for start, count in ((4, 6), (0, 4)):
        result = await bench.engine.run(Batch(item.key, (Part(item, start, count),), count))
        assert not result.in_slots
        (piece,) = result.rows
        found = torch.frombuffer(bytearray(piece), dtype=torch.float16).view(-1, N)
        assert torch.equal(found, y[start : start + count])


async def test_a_result_larger_than_its_slot_goes_another_way(new_bench: MakeBench) -> None:
    bench = new_bench()
    x = torch.randn(12, K).half()  # 960 bytes of x; 1,152 of y
    result = await bench.engine.run(batch_of(bench.item(x, output=DType.F32)))
    assert bench.gpu.trips[0].way == Way(gather=True, scatter=False)
    assert not result.in_slots


async def test_a_stale_slot_reaches_nothing(new_bench: MakeBench) -> None:
    bench = new_bench()
    stale = bench.item(rows(1))
    bench.slab.release(stale.slot)
    bench.item(rows(2))
    with pytest.raises(RuntimeError, match="stale"):
        await bench.engine.run(batch_of(stale))
    assert bench.gpu.trips == []


async def test_without_registration_copies_serve_and_the_log_says_so(
    new_bench: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        bench = new_bench(keeps_out="no locked memory left")
    assert "slab_not_registered" in caplog.text
    assert 'action=pinned_copies reason="no locked memory left"' in caplog.text
    check((await bench.call(rows(1)))[0], rows(1))
    assert bench.gpu.trips[0].way == Way(gather=False, scatter=False)


async def test_pinned_asks_for_no_registration(new_bench: MakeBench) -> None:
    bench = new_bench(mode=PINNED)
    assert bench.gpu.admitted == (0, 0)
    check((await bench.call(rows(1)))[0], rows(1))


async def test_pages_that_kernels_know_stay_where_they_are(new_bench: MakeBench) -> None:
    assert new_bench().slab._is_pinned
    assert not new_bench(mode=PINNED).slab._is_pinned
    assert not new_bench(keeps_out="no locked memory left").slab._is_pinned


async def test_a_batch_whose_rows_are_gone_is_not_tried_again(new_bench: MakeBench) -> None:
    """What lies in the slots may be results: tried again it would give a wrong answer."""
    bench = new_bench()
    bench.gpu.gates["kernel"].clear()
    busy = [bench.call(rows(1)), bench.call(rows(2))]
    await bench.reached("copy_in", 1)
    together = [bench.call(rows(seed)) for seed in (3, 4, 5)]
    bench.gpu.breaks_scatter = True
    open_gates(bench.gpu)
    outcomes = await asyncio.gather(*busy, *together, return_exceptions=True)
    assert all(isinstance(outcome, EngineFailure) for outcome in outcomes)
    trips = len(bench.gpu.trips)
    assert sum(trip.rows for trip in bench.gpu.trips) == 5, "a row was computed twice"
    bench.gpu.breaks_scatter = False
    check((await bench.call(rows(6)))[0], rows(6))
    assert len(bench.gpu.trips) == trips + 1
    bench.gpu.breaks_scatter = True
    with pytest.raises(ActivationsGone, match="half of it was written"):
        await bench.engine.run(batch_of(bench.item(rows(7))))


async def test_a_batch_that_was_not_launched_is_tried_again(new_bench: MakeBench) -> None:
    bench = new_bench()
    bench.gpu.gates["kernel"].clear()
    busy = bench.call(rows(1))
    await bench.reached("copy_in", 1)
    together = [bench.call(rows(seed)) for seed in (2, 3)]
    bench.gpu.refuses = lambda count: "no room" if count > 1 else ""
    open_gates(bench.gpu)
    for seed, future in enumerate([busy, *together], start=1):
        check((await future)[0], rows(seed))


async def test_a_lone_quick_batch_needs_no_thread(
    new_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_engine, "LONE_SECONDS", 5.0)
    bench = new_bench(roofline=QUICK)
    launched = bench.engine._launched
    bench.engine._launched = None  # type: ignore[assignment]
    for seed in range(5):
        check((await bench.call(rows(seed)))[0], rows(seed))
    assert all(trip.alone for trip in bench.gpu.trips)
    bench.engine._launched = launched


async def test_a_lone_batch_that_takes_too_long_is_left_to_the_thread(
    new_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_engine, "LONE_SECONDS", 1e-4)
    bench = new_bench(roofline=QUICK)
    bench.gpu.gates["kernel"].clear()
    call = bench.call(rows(1))
    await bench.reached("kernel begins", 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not call.done()
    open_gates(bench.gpu)
    check((await call)[0], rows(1))


@pytest.mark.parametrize("when", ["launch", "kernel"])
async def test_a_lone_batch_that_fails_fails_alone(
    new_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(gpu_engine, "LONE_SECONDS", 5.0)
    bench = new_bench(roofline=QUICK)
    if when == "launch":
        bench.gpu.refuses = lambda count: "no room"
    else:
        bench.gpu.faults = lambda x: "launch failed"
    with pytest.raises(EngineFailure):
        await bench.call(rows(1))
    bench.gpu.refuses = bench.gpu.faults = lambda x: ""
    check((await bench.call(rows(2)))[0], rows(2))


async def test_only_what_is_quick_and_alone_is_lone(new_bench: MakeBench) -> None:
    bench = new_bench(roofline=QUICK)
    small, large = batch_of(bench.item(rows(1))), batch_of(bench.item(rows(1, 20_000)))
    assert bench.engine.is_lone(small)
    assert not bench.engine.is_lone(large)
    assert not new_bench().engine.is_lone(small), "nothing was measured"
    slow = Roofline(sizes_bytes=(1, 1 << 40), read_seconds=(1.0, 1.0), products_per_second=1e15)
    assert not new_bench(roofline=slow).engine.is_lone(small)
    stage = bench.engine._stages.take(1, 1)
    assert not bench.engine.is_lone(small)
    bench.engine._stages.give_back(stage)


async def test_a_thousand_calls_of_two_layers_are_never_mixed_up(new_bench: MakeBench) -> None:
    bench = new_bench(roofline=QUICK, mode=AUTO)

    async def caller(number: int) -> None:
        name = (NAME, ORDERED.spec.name)[number % 2]
        x = rows(number, number % 9 + 1)
        # torch's own sums differ in their last bits with the rows beside them; another's rows
        # differ by far more.
        (piece,) = (await bench.call(x, name))[0].pieces
        y = torch.frombuffer(bytearray(piece), dtype=torch.float16).view(-1, N).float()
        layer = (LAYER, ORDERED)[number % 2]
        exact = reference.linear(layer, x, output_dtype=DType.F32)
        assert torch.allclose(y, exact, rtol=1e-2, atol=1e-3)

    for start in range(0, 1000, 50):
        await asyncio.gather(*map(caller, range(start, start + 50)))
    assert len(bench.released) == 1000
    ways = {trip.way for trip in bench.gpu.trips}
    assert Way(gather=True, scatter=True) in ways
