"""Two GPUs that share out layers or hold all of each, with an engine over them."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from gpu import loading
from gpu.loading import RecordingKernels
from several_gpus import batch_of

from qlinear_service.batching import Batch, BatchKey
from qlinear_service.dtypes import DType
from qlinear_service.engine import BatchRunner
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.gpu.replicas import ReplicaRunner
from qlinear_service.gpu.split import Part, SplitDevice, outline, ranges
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.gpu.ways import AUTO
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerRegistry, QuantizedLinear
from qlinear_service.results import BatchResult
from qlinear_service.slots import Slab

SLAB_BYTES = 1 << 28


class Pair:
    """Both GPUs, with their streams."""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.kernels: list[RecordingKernels] = []
        for ordinal in (0, 1):
            made = loading.open_kernels(device=ordinal, batch_invariant=batch_invariant)
            self.kernels.append(made)
        self.streams = {f"cuda:{i}": CudaStreams(each) for i, each in enumerate(self.kernels)}

    def moved(self, layer: QuantizedLinear, place: int) -> QuantizedLinear:
        """Return a copy of `layer` there, in memory of its own."""
        host = layer if layer.qweight.device.type == "cpu" else to_host(layer)
        return self.kernels[place].to_device(host)

    def split(self, layers: Sequence[QuantizedLinear]) -> tuple[SplitDevice, LayerRegistry]:
        """Return both as one device, and the layers that are shared out."""
        device, registry = SplitDevice(self.streams), LayerRegistry()
        for layer in layers:
            parts = [
                Part(place, begin, end, self.moved(to_host(layer).features(begin, end), place))
                for place, (begin, end) in enumerate(ranges(layer.spec, 2))
                if begin < end
            ]
            whole = outline(layer)
            device.add(whole, parts)
            registry.add(whole)
        return device, registry


def to_host(layer: QuantizedLinear) -> QuantizedLinear:
    def there(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.cpu()

    return QuantizedLinear(
        spec=layer.spec, qweight=layer.qweight.cpu(), scales=layer.scales.cpu(),
        zeros=there(layer.zeros), bias=there(layer.bias), k_permutation=there(layer.k_permutation),
    )  # fmt: skip


class Running:
    """A runner, its slab, and what it answers."""

    def __init__(self, runner: BatchRunner, slab: Slab) -> None:
        self.runner, self.slab = runner, slab
        self.numbers = itertools.count(1)

    def batch(self, name: str, xs: Sequence[torch.Tensor], output: DType) -> Batch:
        dtype = next(each for each in DType if to_torch(each) == xs[0].dtype)
        on_host = [x.cpu() for x in xs]
        return batch_of(self.slab, self.numbers, BatchKey(name, dtype, output), on_host)

    async def run(self, name: str, *xs: torch.Tensor) -> tuple[torch.Tensor, BatchResult]:
        """Return y as float32, and what else is known of its batch."""
        batch = self.batch(name, xs, DType.F32)
        result = await self.runner.run(batch)
        y = torch.frombuffer(bytearray(b"".join(result.rows)), dtype=torch.float32)
        for part in batch.parts:
            self.slab.view(part.item.slot)[:] = b"\xff" * len(self.slab.view(part.item.slot))
            self.slab.release(part.item.slot)
        return y.view(batch.rows, -1), result

    def now(self, name: str, *xs: torch.Tensor) -> torch.Tensor:
        return asyncio.run(self.run(name, *xs))[0]


@contextmanager
def split_engine(
    pair: Pair, layers: Sequence[QuantizedLinear], mode: str = AUTO
) -> Iterator[Running]:
    """Yield an engine over both GPUs, which share out each layer."""
    device, registry = pair.split(layers)
    slab = Slab(capacity_bytes=SLAB_BYTES, largest_bytes=1 << 26)
    engine = GpuEngine(device=device, registry=registry, slab=slab, mode=mode)
    try:
        yield Running(engine, slab)
    finally:
        assert engine.stop(10)
    assert engine._stages.free == engine.stage_count


@contextmanager
def replicas(pair: Pair, layers: Sequence[QuantizedLinear], mode: str = AUTO) -> Iterator[Running]:
    """Yield an engine on each GPU, both with all layers, behind one runner."""
    slab = Slab(capacity_bytes=SLAB_BYTES, largest_bytes=1 << 26)
    engines = {
        name: GpuEngine(
            device=streams,
            registry=LayerRegistry(pair.moved(layer, place) for layer in layers),
            slab=slab,
            mode=mode,
        )
        for place, (name, streams) in enumerate(pair.streams.items())
    }
    runner = ReplicaRunner(engines)
    try:
        yield Running(runner, slab)
    finally:
        assert runner.stop(10)
