"""Two GPUs that a library pretends to have: places for layers, loading, and a server over them."""

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
from packed_files import write_layers
from running_server import WAIT_SECONDS, decode, quick_config
from several_gpus import LAYERS, cpu_kernels

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_service import loading
from qlinear_service.config import KernelConfig
from qlinear_service.dtypes import DType
from qlinear_service.gpu import places, selftest
from qlinear_service.gpu.choice import Choice
from qlinear_service.gpu.loading import GpuPlace
from qlinear_service.gpu.streams import CudaStreams
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


@pytest.fixture(name="gpus")
def pretended_gpus(
    monkeypatch: pytest.MonkeyPatch,
    kernels: HostKernels,
    library: Path,
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
