"""The engine of a GPU on a device made of threads: overlap, isolation, errors, slots, drain."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
import torch
from fake_gpu import FakeGpu, open_gates
from gpu_bench import LAYER, NAME, ORDERED, STAGES, Bench, K, N, batch_of, check, rows

from qlinear_service.config import size_class
from qlinear_service.dtypes import DType
from qlinear_service.errors import EngineFailure, EngineLost, Unavailable
from qlinear_service.gpu import engine as gpu_engine
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.gpu.stages import FIRST_BYTES, Stage
from qlinear_service.kernels import reference
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerRegistry
from qlinear_service.results import BatchResult
from qlinear_service.slots import Slab


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    open_gates(made.gpu)
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)
    assert made.engine.stop(5)
    assert made.engine._stages.free == STAGES, "a stage was never given back, or twice"
    assert len(made.released) == len(set(made.released)), "a slot was released twice"


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("x_dtype", list(DType))
@pytest.mark.parametrize("sizes", [(1,), (7,), (3, 1, 5), (900,), (900, 30)])
async def test_each_part_gets_its_own_rows(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    x_dtype: DType,
    quick: bool,
) -> None:
    monkeypatch.setattr(gpu_engine, "QUICK_BYTES", 1 << 30 if quick else 0)
    xs = [rows(i, size, to_torch(x_dtype)) for i, size in enumerate(sizes)]
    items = [bench.item(x, output=DType.F32) for x in xs]
    result = await bench.engine.run(batch_of(*items))
    expected = reference.linear(LAYER, torch.cat(xs), output_dtype=DType.F32).split(sizes)
    for piece, y in zip(result.rows, expected, strict=True):
        assert torch.equal(torch.frombuffer(bytearray(piece), dtype=torch.float32).view(-1, N), y)
    assert result.kernel_nanoseconds == 5000
    directions = [direction for direction, _ in result.transfers]
    assert directions == ["gather", "to_device", "from_device", "scatter"]


async def test_the_next_batch_is_copied_in_while_one_computes(bench: Bench) -> None:
    bench.gpu.gates["kernel"].clear()
    first = bench.call(rows(1))
    await bench.reached("kernel begins", 1)
    second = bench.call(rows(2))
    await bench.reached("copy_in", 2)
    assert not first.done(), "its kernel has not ended, let alone its results been settled"
    assert bench.gpu.count("kernel") == 0
    open_gates(bench.gpu)
    check((await first)[0], rows(1))
    check((await second)[0], rows(2))


async def test_one_computes_while_results_are_copied_out(bench: Bench) -> None:
    bench.gpu.gates["copy_out"].clear()
    first = bench.call(rows(1))
    await bench.reached("copy_out begins", 1)
    second = bench.call(rows(2))
    await bench.reached("kernel", 2)
    assert not first.done()
    open_gates(bench.gpu)
    check((await first)[0], rows(1))
    check((await second)[0], rows(2))


async def test_no_more_batches_are_taken_than_there_are_stages(bench: Bench) -> None:
    """What waits for a stage gathers in the queue, and runs as one batch."""
    bench.gpu.gates["kernel"].clear()
    running = [bench.call(rows(1))]
    await bench.reached("copy_in", 1)
    running.append(bench.call(rows(2)))
    await bench.reached("copy_in", 2)
    waiting = [bench.call(rows(seed, 2)) for seed in (3, 4, 5)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.gpu.count("copy_in") == STAGES
    open_gates(bench.gpu)
    for seed, future in enumerate([*running, *waiting], start=1):
        outcome = (await future)[0]
        check(outcome, rows(seed, 1 if seed < 3 else 2))
        assert outcome.batch_rows == (1 if seed < 3 else 6)
    assert sorted(bench.released) == [1, 2, 3, 4, 5]


async def test_a_slot_is_held_until_nothing_reads_it(bench: Bench) -> None:
    """A caller that leaves while its batch is on the device does not free what is still read."""
    bench.gpu.gates["copy_in"].clear()
    item = bench.item(rows(1))
    bench.batcher.submit([item], lambda answer: None)
    await bench.reached("copy_in begins", 1)
    bench.batcher.cancel([item])
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.released == []
    open_gates(bench.gpu)
    check((await bench.call(rows(2)))[0], rows(2))
    assert item.sequence in bench.released


async def test_results_outlive_their_stage(bench: Bench) -> None:
    outcomes = [(await bench.call(rows(seed, 3)))[0] for seed in range(6)]
    for seed, outcome in enumerate(outcomes):
        check(outcome, rows(seed, 3))


async def test_callers_of_two_layers_are_never_mixed_up(bench: Bench) -> None:
    async def caller(number: int) -> None:
        name = (NAME, ORDERED.spec.name)[number % 2]
        x = rows(number, number % 100 + 1)  # some are split over batches in flight
        check((await bench.call(x, name))[0], x, name)

    for start in range(0, 120, 30):
        await asyncio.gather(*map(caller, range(start, start + 30)))
    assert len(bench.released) == 120
    assert bench.batcher.items_held == 0


async def test_a_batch_that_finds_no_memory_is_retried_request_by_request(bench: Bench) -> None:
    def refuses(count: int) -> str:
        return "out of memory: no room for y" if count > 1 else ""

    bench.gpu.gates["kernel"].clear()
    busy = [bench.call(rows(1))]
    await bench.reached("copy_in", 1)
    busy.append(bench.call(rows(2)))
    await bench.reached("copy_in", 2)
    together = [bench.call(rows(seed)) for seed in (3, 4)]
    alone = bench.call(rows(5, 2))
    bench.gpu.refuses = refuses
    open_gates(bench.gpu)
    for seed, future in enumerate([*busy, *together], start=1):
        check((await future)[0], rows(seed))
    with pytest.raises(EngineFailure, match=r"under [0-9a-f]{12}$"):
        await alone
    bench.gpu.refuses = lambda count: ""
    check((await bench.call(rows(6, 2)))[0], rows(6, 2))


async def test_a_fault_while_it_runs_reaches_its_own_caller_only(bench: Bench) -> None:
    bench.gpu.faults = lambda x: "launch failed" if (x == 13).any() else ""
    bad = rows(1)
    bad[0, 0] = 13
    calls = [bench.call(rows(2)), bench.call(bad), bench.call(rows(3))]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    check(outcomes[0][0], rows(2))
    check(outcomes[2][0], rows(3))
    assert isinstance(outcomes[1], EngineFailure)
    assert sorted(bench.released) == [1, 2, 3]


async def test_memory_grows_by_classes_and_no_further_than_the_largest_batch(bench: Bench) -> None:
    first = 2 * STAGES * FIRST_BYTES
    assert sum(bench.gpu.allocated) == first
    large = [bench.item(torch.zeros(20_000, K).half()) for _ in range(4)]
    for item in (*large, *large):
        await bench.engine.run(batch_of(item))
    grown = bench.gpu.allocated[2 * STAGES :]
    # x of 1.6 MB; y of 0.96 MB fits into what was there.
    assert grown == [size_class(20_000 * K * 2)] * STAGES


async def test_a_stage_that_finds_no_room_serves_smaller_batches(bench: Bench) -> None:
    bench.gpu.memory_bytes = sum(bench.gpu.allocated)
    with pytest.raises(RuntimeError, match="out of memory"):
        await bench.engine.run(batch_of(bench.item(torch.zeros(20_000, K).half())))
    bench.gpu.memory_bytes *= 4
    for seed in range(4):
        check((await bench.call(rows(seed)))[0], rows(seed))


@pytest.mark.parametrize("when", ["before", "while it runs"])
async def test_a_lost_device_ends_everything_with_unavailable(bench: Bench, when: str) -> None:
    if when == "before":
        bench.gpu.lost = True
        calls = [bench.call(rows(seed)) for seed in range(5)]
    else:
        bench.gpu.gates["kernel"].clear()
        calls = [bench.call(rows(seed)) for seed in range(5)]
        await bench.reached("kernel begins", 1)
        calls += [bench.call(rows(seed)) for seed in range(5)]
        bench.gpu.lost = True
        open_gates(bench.gpu)
    with pytest.raises(EngineLost, match="illegal memory access"):
        await bench.task
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, Unavailable)
        assert "lost its device" in str(outcome)
    with pytest.raises(EngineLost):
        await bench.engine.run(batch_of(bench.item(rows(9))))


async def test_what_is_on_its_way_is_finished_before_the_threads_end() -> None:
    bench = Bench()
    bench.gpu.gates["kernel"].clear()
    call = bench.call(rows(1))
    await bench.reached("kernel begins", 1)
    assert not bench.engine.stop(0.05), "a batch is still computed"
    open_gates(bench.gpu)
    check((await call)[0], rows(1))
    for thread in bench.engine._threads:
        await asyncio.to_thread(thread.join, 5)
        assert not thread.is_alive()
    bench.task.cancel()
    await asyncio.gather(bench.task, return_exceptions=True)


async def test_more_batches_than_stages_are_a_failure_not_a_mix_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()
    take = bench.engine._stages.take

    def watched(x_bytes: int, y_bytes: int) -> Stage:
        try:
            return take(x_bytes, y_bytes)
        except RuntimeError:
            refused.set()
            raise

    monkeypatch.setattr(bench.engine._stages, "take", watched)
    bench.gpu.gates["kernel"].clear()
    tasks = [
        asyncio.create_task(bench.engine.run(batch_of(bench.item(rows(seed))))) for seed in range(3)
    ]
    assert await asyncio.to_thread(refused.wait, 10)
    open_gates(bench.gpu)
    with pytest.raises(RuntimeError, match="more batches are in flight"):
        await tasks[2]
    results: list[BatchResult] = await asyncio.gather(*tasks[:2])
    assert all(len(result.rows) == 1 for result in results)


async def test_a_device_without_room_for_the_first_buffers_is_refused() -> None:
    gpu = FakeGpu()
    gpu.memory_bytes = FIRST_BYTES
    slab = Slab(capacity_bytes=1 << 20, largest_bytes=1 << 18)
    with pytest.raises(RuntimeError, match="out of memory"):
        GpuEngine(device=gpu, registry=LayerRegistry([LAYER]), slab=slab)
