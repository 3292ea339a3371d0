"""The engine on a real GPU, in this process: results, overlap, times, full memory, self-test."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest
import torch
from gpu.loading import RecordingKernels
from gpu.problems import Form, Problem

from qlinear_service.batching import Batch, BatchKey, Part, WorkItem
from qlinear_service.config import TRANSFERS
from qlinear_service.dtypes import DType
from qlinear_service.errors import OutOfDeviceMemory, SelfTestError
from qlinear_service.gpu import engine as gpu_engine
from qlinear_service.gpu import loading, probe
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.gpu.selftest import run_gpu_self_test
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.gpu.telemetry import REASONS, open_telemetry
from qlinear_service.gpu.ways import AUTO, PINNED
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerRegistry, LayerSpec
from qlinear_service.slots import Slab

K, N = 1000, 520


class Bench:
    """An engine over layers of all kinds, whose rows travel in one of the ways."""

    def __init__(self, kernels: RecordingKernels, mode: str = AUTO) -> None:
        self.mode = mode
        self.kernels = kernels
        self.slab = Slab(capacity_bytes=1 << 30, largest_bytes=1 << 27)
        self.streams = CudaStreams(kernels)
        forms = (Form(), Form(permuted=True, group_size=32), Form(bits=8, bias=torch.float16))
        self.layers = [Problem(kernels.device, N, K, form, seed=i).layer for i, form in
                       enumerate(forms)]  # fmt: skip
        registry = LayerRegistry()
        for number, layer in enumerate(self.layers):
            registry._by_name[f"layer{number}"] = layer
        self.engine = GpuEngine(
            device=self.streams, registry=registry, slab=self.slab, mode=mode, chained=0
        )
        self.numbers = itertools.count(1)

    def batch(self, number: int, *xs: torch.Tensor, output: DType = DType.F32) -> Batch:
        """Return a batch of one item for each x, of any dtype that they share."""
        parts = []
        dtype = next(each for each in DType if to_torch(each) == xs[0].dtype)
        key = BatchKey(f"layer{number}", dtype, output)
        for x in xs:
            data = x.contiguous().view(torch.uint8).numpy().tobytes()
            slot = self.slab.acquire(len(data))
            self.slab.view(slot)[: len(data)] = data
            item = WorkItem(sequence=next(self.numbers), key=key, rows=len(x), slot=slot,
                            nbytes=len(data), enqueued_at=0.0)  # fmt: skip
            parts.append(Part(item, 0, len(x)))
        return Batch(key, tuple(parts), sum(map(len, xs)))

    def expected(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Return what the same kernel gives for the same batch: the bits must be the same."""
        layer = self.layers[number]
        if self.mode != PINNED and x.dtype == torch.float32:
            x = x.to(to_torch(layer.spec.compute_dtype))  # on its way in, and so for other plans
        y = self.kernels.linear(layer, x.to(self.kernels.device), DType.F32)
        self.kernels.wait()
        return y.cpu()

    async def check(self, number: int, *xs: torch.Tensor) -> None:
        batch = self.batch(number, *xs)
        result = await self.engine.run(batch)
        joined = torch.frombuffer(bytearray(b"".join(result.rows)), dtype=torch.float32)
        assert torch.equal(joined.view(-1, N), self.expected(number, torch.cat(xs)))
        assert 0 < result.kernel_nanoseconds < 5_000_000
        for part in batch.parts:
            self.slab.view(part.item.slot)[:] = b"\xff" * len(self.slab.view(part.item.slot))
            self.slab.release(part.item.slot)


@pytest.fixture(params=TRANSFERS)
def bench(kernels: RecordingKernels, request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(kernels, request.param)
    yield made
    assert made.engine.stop(10)
    assert made.engine._stages.free == made.engine.stage_count


def draw(seed: int, rows: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn((rows, K), generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_batches_of_every_size_and_layer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, quick: bool
) -> None:
    monkeypatch.setattr(gpu_engine, "QUICK_BYTES", 1 << 30 if quick else 0)

    async def run() -> None:
        for number in range(3):
            for sizes in ((1,), (3, 1, 5), (64,), (700, 1, 300)):
                await bench.check(number, *(draw(i, m, dtype) for i, m in enumerate(sizes)))

    asyncio.run(run())


def test_two_in_flight_are_never_mixed_up(bench: Bench) -> None:
    async def caller(place: int) -> None:
        for turn in range(150):
            await bench.check((place + turn) % 3, draw(1000 * place + turn, 1 + turn % 90))

    async def run() -> None:
        await asyncio.gather(*map(caller, range(gpu_engine.STAGES)))

    asyncio.run(run())


def test_the_next_batch_is_copied_in_while_one_computes(bench: Bench) -> None:
    stages = list(bench.engine._stages._free)

    async def run() -> None:
        await bench.check(0, draw(0, 64))
        await bench.check(1, draw(0, 64))
        with torch.cuda.stream(bench.streams._compute):
            torch.cuda._sleep(200_000_000)  # a tenth of a second
        tasks = [asyncio.create_task(bench.engine.run(bench.batch(n, draw(n, 8)))) for n in (0, 1)]
        for _ in range(1000):
            await asyncio.sleep(0.0005)
            if all(stage.marks.in_stop.query() for stage in stages):
                break
        assert all(stage.marks.in_stop.query() for stage in stages), "copies waited for kernels"
        assert not any(stage.marks.out_stop.query() for stage in stages)
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_times_are_those_of_the_device(bench: Bench) -> None:
    assert 0 <= bench.streams.pair_nanoseconds < 10_000

    async def run() -> list[int]:
        return [(await bench.engine.run(bench.batch(0, draw(i, 1)))).kernel_nanoseconds
                for i in range(200)]  # fmt: skip

    median = sorted(asyncio.run(run()))[100]
    assert 500 <= median < 60_000, "a layer of 260 KB takes some microseconds"


def test_a_batch_without_room_fails_and_the_next_one_does_not(bench: Bench) -> None:
    room: list[torch.Tensor] = []

    async def run() -> None:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(bench.kernels.device)
        room.append(torch.empty(free - (8 << 20), dtype=torch.uint8, device=bench.kernels.device))
        large = bench.batch(0, draw(1, 40_000))  # x and y take 128 MiB of the device
        with pytest.raises(RuntimeError, match="out of memory"):
            await bench.engine.run(large)
        room.clear()
        torch.cuda.empty_cache()
        for turn in range(4):
            await bench.check(turn % 3, draw(turn, 5))

    asyncio.run(run())


def test_the_self_test_knows_right_from_wrong(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_gpu_self_test(bench.kernels, bench.layers) >= len(bench.layers)
    right = bench.kernels.linear

    def wrong(*words: object, **more: object) -> torch.Tensor:
        y = right(*words, **more)  # type: ignore[arg-type]
        y[:, -1] += 100
        return y

    monkeypatch.setattr(bench.kernels, "linear", wrong)
    with pytest.raises(SelfTestError, match=r"GPU kernel '.+' .m=13. disagree"):
        run_gpu_self_test(bench.kernels, bench.layers)


def test_the_probe_finds_a_plausible_machine(kernels: RecordingKernels) -> None:
    roofline = probe.measure(kernels)
    print(roofline)
    assert len(roofline.sizes_bytes) == 6
    assert 1e11 < roofline.peak_bytes_per_second < 2e13
    assert list(roofline.read_seconds) == sorted(roofline.read_seconds)
    assert 1e13 < roofline.products_per_second < 1e16


def test_the_gpu_says_how_it_is(kernels: RecordingKernels) -> None:
    pytest.importorskip("pynvml", reason="install nvidia-ml-py, of the extra server")
    telemetry = open_telemetry(kernels.device)
    assert telemetry is not None
    telemetry.stop()
    telemetry.sample()
    found = telemetry()
    print(found)
    assert found["qlinear_gpu_clock_hertz",] > 1e8
    assert found["qlinear_gpu_memory_clock_hertz",] > 1e8
    assert 10 < found["qlinear_gpu_power_watts",] < 2000
    assert 5 < found["qlinear_gpu_temperature_celsius",] < 110
    reasons = {found["qlinear_gpu_throttle_reason", name] for name in REASONS}
    assert found["qlinear_gpu_throttled",] == max(reasons)
    assert reasons <= {0.0, 1.0}
    # What a data centre's memory counts; GeForce cards do not.
    assert all(found.get(("qlinear_gpu_memory_errors", kind), 0.0) >= 0.0
               for kind in ("corrected", "uncorrected"))  # fmt: skip


def test_layers_larger_than_the_gpu_are_refused_before_they_are_read(
    kernels: RecordingKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = loading.GpuPlace.__new__(loading.GpuPlace)
    place.kernels, place.name = kernels, "cuda:0"
    spec = LayerSpec(model="m", module="l", n=1 << 20, k=1 << 20, bits=8, group_size=128,
                     symmetric=True, has_bias=False, scale_dtype=DType.F16)  # fmt: skip
    with pytest.raises(OutOfDeviceMemory, match=r"the layers take 1040\.00 GiB on cuda:0"):
        place.check_fits([spec])
    place.check_fits([])
