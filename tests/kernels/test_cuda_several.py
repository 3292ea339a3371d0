"""Two GPUs that a library pretends to have: streams, places, loading, and a server over them."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fake_cuda import HostKernels
from measured_layers import Samples, scrape, value
from packed_files import write_layers
from running_server import WAIT_SECONDS, decode, quick_config
from several_gpus import LAYERS, K, cpu_kernels, draw
from test_cuda_streams import kernels, library  # noqa: F401 - fixtures

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_service import loading
from qlinear_service.config import TRANSFERS, KernelConfig
from qlinear_service.dtypes import DType
from qlinear_service.errors import OutOfDeviceMemory, SelfTestError
from qlinear_service.gpu import loading as gpu_loading
from qlinear_service.gpu import places, selftest
from qlinear_service.gpu.choice import Choice
from qlinear_service.gpu.loading import GpuPlace
from qlinear_service.gpu.places import GpuPlaces
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.gpu.ways import PINNED
from qlinear_service.kernels.cuda_abi import Status
from qlinear_service.layers import QuantizedLinear
from qlinear_service.loaded import Loaded
from qlinear_service.roofline import Roofline
from qlinear_service.server import Server

ROOFLINE = Roofline(sizes_bytes=(1 << 20,), read_seconds=(1e-4,), products_per_second=1e12)
GIB = 1 << 30
NAMES = ("cuda:0", "cuda:1")
SPLIT_NAMES = [name for name in LAYERS if name != "test/plain"]


class HostPlace(GpuPlace):
    """A GPU of the library that pretends."""

    library: Path
    free_bytes: dict[str, int]
    wrong = ""

    def __init__(self, config: KernelConfig, stop: threading.Event) -> None:
        self.name = config.device
        (ordinal,) = config.cuda_ordinals
        assert not config.devices
        self.kernels = HostKernels(
            self.library, device=ordinal, batch_invariant=config.batch_invariant
        )
        self.device = CudaStreams(self.kernels)
        self._roofline = ROOFLINE
        self.telemetry = lambda: {("qlinear_gpu_power_watts",): 100.0 + ordinal}

    @contextlib.contextmanager
    def filling(self) -> Iterator[Any]:
        yield self._put

    def tuned_bandwidths(self, layers: Any) -> Any:
        return [(layer.spec.shape, 8, 1e12) for layer in layers if layer.spec.quantized]

    def _memory(self) -> tuple[int, int]:
        return self.free_bytes[self.name], 100 * GIB


@pytest.fixture
def gpus(
    monkeypatch: pytest.MonkeyPatch,
    kernels: HostKernels,  # noqa: F811
    library: Path,  # noqa: F811
) -> HostKernels:
    """Two GPUs; what cannot be pretended is left out."""
    kernels.library.fake_devices(2)
    kernels.library.fake_rows_reset()
    monkeypatch.setattr(HostPlace, "library", library, raising=False)
    monkeypatch.setattr(HostPlace, "free_bytes", dict.fromkeys(NAMES, 50 * GIB), raising=False)
    monkeypatch.setattr(places, "GpuPlace", HostPlace)
    monkeypatch.setattr(loading, "choose_device", lambda config: Choice(config=config, why=""))
    monkeypatch.setattr(selftest, "SIZES", ((64, 128),))
    monkeypatch.setattr(selftest, "ROWS", (1, 13))
    return kernels


def config_of(mode: str, **more: Any) -> KernelConfig:
    options = {"measure_seconds": 0, "cpu_threads": 1, **more}
    return KernelConfig(devices="0,1", device="cuda:0", device_mode=mode, **options)


def load(folder: Path, mode: str, **more: Any) -> Loaded:
    path = write_layers(folder / "test.safetensors", list(LAYERS.values()))
    return loading.load(path, config_of(mode, unquantized="keep", **more), threading.Event())


def expected(name: str, x: torch.Tensor) -> torch.Tensor:
    """What one device computes."""
    return cpu_kernels().linear(LAYERS[name], x, DType.F16)


@contextlib.asynccontextmanager
async def serving(loaded: Loaded, mode: str) -> AsyncIterator[tuple[Server, Any]]:
    server = Server(quick_config(kernels=config_of(mode)))
    port = await server.bind()
    await server.load(lambda stop: loaded)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield server, pb_grpc.QuantizedLinearStub(channel)
    assert await server.drain()


async def matmul(stub: Any, x: torch.Tensor, *names: str) -> list[torch.Tensor]:
    data = x.contiguous().view(torch.uint8).numpy().tobytes()
    tensor = pb.Tensor(dtype=1, shape=x.shape, data=data)
    answer = await stub.MatMul(pb.MatMulRequest(layers=names, x=tensor), timeout=WAIT_SECONDS)
    return [decode(y) for y in answer.y]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("mode", ["split", "replicate"])
async def test_a_server_on_two_gpus_answers_with_the_bits_of_one(
    gpus: HostKernels, tmp_path: Path, mode: str, invariant: bool
) -> None:
    """Loaded from a file, tested, and asked over the wire, for one layer and for several."""
    loaded = load(tmp_path, mode, batch_invariant=invariant)
    async with serving(loaded, mode) as (_, stub):
        assert int(gpus.library.fake_registered()) > 0, "kernels see the slab"

        async def caller(seed: int) -> None:
            for turn in range(4):
                x = draw(10 * seed + turn, 1 + seed % 4)
                names = SPLIT_NAMES[(seed + turn) % 4 :] if turn % 2 else (SPLIT_NAMES[seed % 4],)
                for name, y in zip(names, await matmul(stub, x, *names), strict=True):
                    assert torch.equal(y, expected(name, x)), name

        await asyncio.gather(*map(caller, range(12)))
        x = draw(1, 3)
        (plain,) = await matmul(stub, x, "test/plain")  # alone: torch minds the other rows
        assert torch.equal(plain, expected("test/plain", x))
    assert int(gpus.library.fake_registered()) == 0


def kernel_of(samples: Samples, name: str, layer: str, device: str) -> float:
    shape = LAYERS[layer].spec.shape
    return value(samples, f"qlinear_kernel_{name}", shape=shape, m="8", device=device)


async def test_each_device_of_a_split_has_its_own_metrics(
    gpus: HostKernels, tmp_path: Path
) -> None:
    loaded = load(tmp_path, "split")
    async with serving(loaded, "split") as (server, stub):
        await matmul(stub, draw(1, 3), "test/up")
        samples = scrape(server.metrics)
        layer = LAYERS["test/up"]
        halves = (128, 192)
        for device, n in zip(NAMES, halves, strict=True):
            part = layer.features(0, n)
            nbytes = part.streamed_bytes + 3 * 2 * (K + n)
            assert kernel_of(samples, "bytes_total", "test/up", device) == nbytes
            assert kernel_of(samples, "busy_seconds_total", "test/up", device) > 0
            peak = value(samples, "qlinear_hbm_peak_bytes_per_second", device=device)
            assert peak == ROOFLINE.peak_bytes_per_second
            watts = value(samples, "qlinear_gpu_power_watts", device=device)
            assert watts == 100.0 + NAMES.index(device)
            tuned = {"shape": layer.spec.shape, "m": "8", "device": device}
            assert value(samples, "qlinear_tuned_bandwidth_bytes_per_second", **tuned) == 1e12
        weights = [value(samples, "qlinear_weight_bytes", device=device) for device in NAMES]
        assert sum(weights) == sum(one.packed_bytes for one in LAYERS.values()) + (
            K * 4  # the order of its columns lies on both
        )
        assert value(samples, "qlinear_batch_rows_count", shape=layer.spec.shape) == 1
        (live,) = server.metrics.live()
        assert (live.launches, live.batches, live.rows) == (2, 1.0, 3.0)
        listed = await stub.ListLayers(pb.ListLayersRequest())
        where = {one.name: one.device for one in listed.layers}
        assert where["test/up"] == "cuda:0,cuda:1"
        assert where["test/plain"] in NAMES
        assert where["test/narrow"] in NAMES
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.device == "cuda:0,cuda:1"
        build = {"version": info.version, "device": "cuda:0,cuda:1", "kernels": "cuda"}
        assert value(samples, "qlinear_build_info", **build) == 1


async def test_each_replica_has_its_own_metrics(gpus: HostKernels, tmp_path: Path) -> None:
    loaded = load(tmp_path, "replicate")
    async with serving(loaded, "replicate") as (server, stub):
        await asyncio.gather(*(matmul(stub, draw(i, 3), "test/up", "test/wide") for i in range(9)))
        samples = scrape(server.metrics)
        counted = 0.0
        for device in NAMES:
            weights = value(samples, "qlinear_weight_bytes", device=device)
            assert weights == sum(one.packed_bytes for one in LAYERS.values())
            for (name, labels), found in samples.items():
                if name == "qlinear_kernel_seconds_count" and ("device", device) in labels:
                    counted += found
        rows = [v for (name, _), v in samples.items() if name == "qlinear_batch_rows_count"]
        assert counted == sum(rows) > 0
        listed = await stub.ListLayers(pb.ListLayersRequest())
        assert {one.device for one in listed.layers} == {"cuda:0,cuda:1"}
    assert loaded.roofline == ROOFLINE, "a replica reads all of a layer"


@pytest.mark.parametrize("transfers", TRANSFERS)
def test_what_batches_cost_is_measured_on_all_that_compute_them(
    gpus: HostKernels, tmp_path: Path, transfers: str
) -> None:
    more = {"transfers": transfers, "measure_seconds": 1, "cache_dir": tmp_path / "cache"}
    loaded = load(tmp_path, "split", **more)
    assert int(gpus.library.fake_row_scatters()) == 0, "another device may still read"
    assert loaded.curves.keys() == {layer.spec.shape for layer in LAYERS.values()}
    (kept,) = (tmp_path / "cache/curves").glob("*.json")
    assert "split over 2" in kept.read_text()
    load(tmp_path, "replicate", **more)
    assert len(list((tmp_path / "cache/curves").glob("*.json"))) == 2, "those are others"
    assert (int(gpus.library.fake_row_scatters()) > 0) == (transfers != PINNED)


def test_a_split_reads_at_the_rate_of_all(gpus: HostKernels, tmp_path: Path) -> None:
    roofline = load(tmp_path, "split").roofline
    assert roofline is not None
    assert roofline.peak_bytes_per_second == 2 * ROOFLINE.peak_bytes_per_second
    assert roofline.products_per_second == 2 * ROOFLINE.products_per_second


def test_what_a_gpu_must_hold_is_what_belongs_there(gpus: HostKernels) -> None:
    layer = LAYERS["test/up"]
    specs = [layer.spec] * 100_000  # 2 GiB in all
    needed = sum(map(gpu_loading.device_bytes, specs))
    half = needed // 2 + needed // 8 + gpu_loading.RESERVE_BYTES
    HostPlace.free_bytes = dict.fromkeys(NAMES, half)
    GpuPlaces(config_of("split"), threading.Event()).check_fits(specs)
    with pytest.raises(OutOfDeviceMemory, match="on cuda:0"):
        GpuPlaces(config_of("replicate"), threading.Event()).check_fits(specs)
    HostPlace.free_bytes = {"cuda:0": half, "cuda:1": GIB}
    with pytest.raises(OutOfDeviceMemory, match="on cuda:1"):
        GpuPlaces(config_of("split"), threading.Event()).check_fits(specs)


@pytest.mark.parametrize("mode", ["split", "replicate"])
def test_a_gpu_that_computes_wrongly_is_found_whichever_it_is(
    gpus: HostKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    right = HostKernels.linear

    def wrong(self: HostKernels, layer: QuantizedLinear, *words: Any, **more: Any) -> torch.Tensor:
        y = right(self, layer, *words, **more)
        if self.runtime.ordinal == 1 and layer.spec.name == "test/up":
            y[-1, -1] += 100
        return y

    monkeypatch.setattr(HostKernels, "linear", wrong)
    with pytest.raises(SelfTestError, match="test/up"):
        load(tmp_path, mode)


def test_columns_in_the_wrong_place_are_found_before_anything_is_served(
    gpus: HostKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = places.SplitDevice.results

    def rolled(self: Any, *words: Any) -> memoryview:
        flat = bytearray(right(self, *words))
        return memoryview(flat[2:] + flat[:2])

    monkeypatch.setattr(places.SplitDevice, "results", rolled)
    with pytest.raises(SelfTestError, match="columns of cpu"):
        load(tmp_path, "split")


async def test_memory_is_let_go_of_when_all_have(gpus: HostKernels) -> None:
    made = GpuPlaces(config_of("split"), threading.Event())
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert made.device is not None
    assert made.device.admit(memory.data_ptr(), 4096) == ""
    assert int(gpus.library.fake_registered()) == 4096
    made.device.dismiss(memory.data_ptr())
    assert int(gpus.library.fake_registered()) == 0
    gpus.library.fake_fail_registers(1)
    assert "registering" in made.device.admit(memory.data_ptr(), 4096)
    assert int(gpus.library.fake_registered()) == 0


def test_who_has_registered_what_is_counted(gpus: HostKernels) -> None:
    """By the code of the real library, csrc/cuda/registered.h."""
    library, memory = gpus.library, torch.zeros(64, dtype=torch.uint8)  # noqa: F811
    address = memory.data_ptr()

    def statuses(*calls: tuple[str, int, int]) -> list[int]:
        found = []
        for what, nbytes, device in calls:
            words = (address, nbytes, device) if what == "register" else (address, device)
            found.append(int(getattr(library, f"ql_cuda_{what}")(*words)))
        return found

    assert statuses(("unregister", 0, 0)) == [Status.CUDA_ERROR], "nobody has it"
    assert statuses(("register", 64, 0), ("register", 64, 1)) == [Status.OK, Status.OK]
    assert statuses(("register", 64, 1)) == [Status.CUDA_ERROR], "twice"
    assert statuses(("register", 32, 2)) == [Status.CUDA_ERROR], "another area"
    assert statuses(("unregister", 0, 0), ("unregister", 0, 0)) == [Status.OK, Status.BAD_DEVICE]
    assert int(library.fake_registered()) == 64, "one still has it"
    assert statuses(("unregister", 0, 1), ("unregister", 0, 1)) == [Status.OK, Status.CUDA_ERROR]
    assert int(library.fake_registered()) == 0
    assert statuses(("register", 32, 1), ("unregister", 0, 1)) == [Status.OK, Status.OK]


async def test_a_device_that_does_not_answer_ends_all(gpus: HostKernels, tmp_path: Path) -> None:
    loaded = load(tmp_path, "split")
    server = Server(quick_config(kernels=config_of("split")))
    port = await server.bind()
    await server.load(lambda stop: loaded)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.QuantizedLinearStub(channel)
        await matmul(stub, draw(1, 2), "test/up")
        gpus.library.fake_lose()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await matmul(stub, draw(1, 2), "test/up")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.batch_loop is not None
    with pytest.raises(Exception, match="is lost"):
        await asyncio.wait_for(server.batch_loop, WAIT_SECONDS)
    assert await server.abandon()
