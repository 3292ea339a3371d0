"""Layers shared out over several GPUs: the bits of one device, whatever goes wrong."""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from random_layers import random_layer
from several_gpus import LAYERS, Bench, all_of, benches, draw

from qlinear_service.config import TRANSFERS
from qlinear_service.errors import EngineLost
from qlinear_service.gpu import engine as gpu_engine
from qlinear_service.gpu.split import SplitStage, outline, ranges
from qlinear_service.gpu.stages import FIRST_BYTES
from qlinear_service.gpu.ways import AUTO, PINNED, TABLE_ROWS
from qlinear_service.kernels.cuda import DeviceLost
from qlinear_service.layers import LayerSpec
from qlinear_service.roofline import Roofline

UP, PLAIN = "test/up", "test/plain"
QUICK = Roofline(sizes_bytes=(1, 1 << 40), read_seconds=(1e-6, 1e-6), products_per_second=1e15)


@pytest.fixture
def new_bench() -> Iterator[Any]:
    with benches() as make:
        yield make


@pytest.mark.parametrize("mode", TRANSFERS)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
async def test_results_are_bit_for_bit_those_of_one_device(
    new_bench: Any, mode: str, count: int, dtype: torch.dtype
) -> None:
    bench: Bench = new_bench(count, mode)
    for name, sizes in itertools.product(LAYERS, ((1,), (3, 1, 5), (70, 2))):
        await bench.check(name, *(draw(i, rows, dtype) for i, rows in enumerate(sizes)))


@pytest.mark.parametrize("quick", [True, False])
async def test_large_batches_and_batches_of_many_calls(
    new_bench: Any, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    monkeypatch.setattr(gpu_engine, "QUICK_BYTES", 1 << 30 if quick else 0)
    bench: Bench = new_bench()
    for name in LAYERS:
        await bench.check(name, *(draw(i, 1) for i in range(200)))
        await bench.check(name, draw(1, TABLE_ROWS + 100), draw(2, 3))
        await bench.check(name, draw(3, 2))


async def test_batches_in_flight_are_never_mixed_up(new_bench: Any) -> None:
    bench: Bench = new_bench()

    async def caller(place: int) -> None:
        for turn in range(60):
            name = list(LAYERS)[(place + turn) % len(LAYERS)]
            await bench.check(name, draw(1000 * place + turn, 1 + turn % 40))

    await asyncio.gather(*map(caller, range(bench.engine.stage_count)))


async def test_each_device_holds_its_features_only(new_bench: Any) -> None:
    bench: Bench = new_bench(2)
    for name, layer in LAYERS.items():
        whole = bench.registry.resolve(name)
        parts = bench.split.parts_of(whole)
        assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
        assert parts[-1].end == layer.spec.n
        assert sum(part.layer.streamed_bytes for part in parts) == layer.streamed_bytes
        assert (whole.packed_bytes, whole.spec) == (layer.packed_bytes, layer.spec)
        assert whole.qweight.is_meta
    halves = bench.split.parts_of(bench.registry.resolve(UP))
    assert [part.layer.spec.n for part in halves] == [128, 192]
    assert len(bench.split.parts_of(bench.registry.resolve(PLAIN))) == 1, "torch's sums"


def test_layers_that_stay_whole_lie_on_all_devices() -> None:
    spec = random_layer(n=100, k=64, group_size=32).spec
    found = []
    for number in range(300):
        whole = replaced(spec, bits=16, module=f"model.layers.{number}.down_proj")
        found.append([end > begin for begin, end in ranges(whole, 3)].index(True))
    assert all(found.count(place) > 60 for place in range(3))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_features_are_shared_out_evenly_at_multiples_of_64(count: int) -> None:
    for n in (1, 24, 63, 64, 65, 128, 200, 257, 1000, 28672):
        spec = random_layer(n=1, k=64, group_size=32).spec
        cut = ranges(replaced(spec, n=n), count)
        assert [end for _, end in cut[:-1]] == [begin for begin, _ in cut[1:]]
        assert (cut[0][0], cut[-1][1]) == (0, n)
        assert all(begin % 64 == 0 or begin == n for begin, _ in cut)
        sizes = [-(-end // 64) - begin // 64 for begin, end in cut]
        assert max(sizes) - min(sizes) <= 1
        plain = ranges(replaced(spec, n=n, bits=16), count)
        assert sorted(end - begin for begin, end in plain) == [0] * (count - 1) + [n]


def replaced(spec: LayerSpec, **more: Any) -> LayerSpec:
    return LayerSpec(**{field: getattr(spec, field) for field in spec.__slots__} | more)


async def test_times_are_those_of_the_slowest_and_of_each(new_bench: Any) -> None:
    bench: Bench = new_bench(3)
    times = bench.gpus[1].times
    bench.gpus[1].times = lambda marks: times(marks)._replace(kernel=9000)  # type: ignore[method-assign]
    result = await bench.engine.run(bench.batch(UP, draw(0, 2)))
    assert result.kernel_nanoseconds == 9000
    assert result.launches == (("cuda:0", 5000), ("cuda:1", 9000), ("cuda:2", 5000))
    result = await bench.engine.run(bench.batch(PLAIN, draw(0, 2)))
    assert len(result.launches) == 1


async def test_a_lone_batch_is_waited_for_on_all_devices(new_bench: Any) -> None:
    bench: Bench = new_bench(2, AUTO, roofline=QUICK)
    batch = bench.batch(UP, draw(1, 1))
    assert bench.engine.is_lone(batch)
    await bench.check(UP, draw(1, 1), run=bench.engine.run_lone)
    assert [trip.alone for gpu in bench.gpus for trip in gpu.trips] == [True, True]
    # One of two is late: the batch is left to the thread, and ends there.
    bench.gpus[1].gates["kernel"].clear()
    running = asyncio.create_task(bench.check(UP, draw(2, 1), run=bench.engine.run_lone))
    await asyncio.to_thread(bench.gpus[1].until, "kernel begins", 2)
    await asyncio.sleep(0.01)
    assert not running.done()
    bench.gpus[1].gates["kernel"].set()
    await running


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("how", ["refuses", "faults"])
async def test_what_fails_on_one_device_fails_alone_and_not_before_the_others_have_ended(
    new_bench: Any, broken: int, how: str
) -> None:
    bench: Bench = new_bench()
    bad, good = bench.gpus[broken], bench.gpus[1 - broken]
    setattr(bad, how, lambda x: "broken" if (x if how == "refuses" else len(x)) == 7 else "")
    good.gates["kernel"].clear()
    failing = asyncio.create_task(bench.engine.run(bench.batch(UP, draw(0, 7))))
    if how == "faults" or broken == 1:  # else the other is not even asked
        await asyncio.to_thread(good.until, "kernel begins", 1)
        await asyncio.sleep(0.01)
        assert not failing.done(), "its stage would be given away while a device still writes"
    good.gates["kernel"].set()
    with pytest.raises(RuntimeError, match="broken"):
        await failing
    for turn in range(5):
        await bench.check(UP, draw(turn, 3))


@pytest.mark.parametrize("lost", [0, 1])
async def test_one_lost_device_is_the_loss_of_all(new_bench: Any, lost: int) -> None:
    bench: Bench = new_bench()
    await bench.check(UP, draw(0, 3))
    bench.gpus[lost].lost = True
    batches = [bench.batch(UP, draw(i, 3)) for i in range(2)]
    assert all(isinstance(error, EngineLost) for error in await all_of(bench.engine, batches))
    with pytest.raises(EngineLost):
        await bench.engine.run(bench.batch(UP, draw(0, 3)))


def test_the_device_that_is_lost_is_named(new_bench: Any) -> None:
    bench: Bench = new_bench()
    for place, gpu in enumerate(bench.gpus):
        told = f"cuda:{place} is lost"
        gpu.explained = (  # type: ignore[method-assign]
            lambda error, gpu=gpu, told=told: (
                EngineLost(told) if gpu.lost or isinstance(error, DeviceLost) else error
            )
        )
    bench.gpus[1].lost = True
    for error in (DeviceLost("no answer"), RuntimeError("no answer")):
        assert str(bench.split.explained(error)) == "cuda:1 is lost"
    bench.gpus[1].lost = False
    mere = RuntimeError("a bad launch")
    assert bench.split.explained(mere) is mere


async def test_a_device_without_room_fails_that_batch_alone(new_bench: Any) -> None:
    """After that no device copies from host memory that another has let go of."""
    for full in (0, 1):
        bench: Bench = new_bench(2, PINNED, stages=1, chained=0)
        await bench.check(UP, draw(0, 3))
        bench.gpus[full].memory_bytes = sum(bench.gpus[full].allocated)
        with pytest.raises(RuntimeError, match="out of memory"):
            await bench.engine.run(bench.batch(UP, draw(1, 8000)))
        bench.gpus[full].memory_bytes = 1 << 40
        for turn, rows in enumerate((3, 6000, 5, 9000, 1)):
            await bench.check(UP, draw(10 + turn, rows))


def test_stages_of_all_devices_copy_from_the_same_memory(new_bench: Any) -> None:
    stage = new_bench(3).split.new_stage()
    assert isinstance(stage, SplitStage)
    assert not stage.fits(1, 1)
    for x_bytes, y_bytes in ((1 << 12, 1 << 12), (1 << 14, 1 << 10), (1 << 10, 1 << 16)):
        stage.grow(x_bytes, y_bytes)
        assert stage.fits(x_bytes, y_bytes)
        assert len({inner.x.host.data_ptr() for inner in stage.stages}) == 1
        assert len({inner.y.host.data_ptr() for inner in stage.stages}) == 3
    assert stage.fits(1 << 14, 1 << 16), "they stay as large as they were"


def test_the_slab_is_for_all_devices_or_for_none() -> None:
    made = Bench(3, PINNED)
    made.gpus[2].keeps_out = "locked memory is full"
    assert made.split.admit(4096, 100) == "locked memory is full"
    assert [gpu.admitted for gpu in made.gpus] == [(0, 0)] * 3
    made.gpus[2].keeps_out = ""
    assert made.split.admit(4096, 100) == ""
    assert [gpu.admitted for gpu in made.gpus] == [(4096, 100)] * 3
    assert made.engine.stop(5)


def test_an_outline_holds_no_memory() -> None:
    for layer in LAYERS.values():
        drawn = outline(layer)
        assert (drawn.packed_bytes, drawn.streamed_bytes) == (
            layer.packed_bytes,
            layer.streamed_bytes,
        )
        assert (drawn.k_permutation is None) == (layer.k_permutation is None)
        assert drawn.qweight.is_meta


def test_one_batch_needs_one_stage_on_each_device(new_bench: Any) -> None:
    bench: Bench = new_bench()
    stages = bench.engine.stage_count
    for gpu in bench.gpus:
        assert gpu.allocated == [FIRST_BYTES] * (2 * stages)
