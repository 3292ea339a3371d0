"""GPUs made of threads that compute with the CPU kernels, side by side in either way.

What one feature's sum is does not depend on how many others there are with these kernels, so that
results must be those of one device, bit for bit.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, open_gates
from random_layers import random_layer, unquantized_layer

from qlinear_service.batching import Batch, BatchKey, Part, WorkItem
from qlinear_service.dtypes import DType
from qlinear_service.engine import BatchRunner
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.gpu.split import Part as Piece
from qlinear_service.gpu.split import SplitDevice, outline, ranges
from qlinear_service.gpu.ways import AUTO
from qlinear_service.kernels import build
from qlinear_service.kernels.backends import CpuKernels
from qlinear_service.kernels.packing import pack
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerRegistry, LogicalLayer, QuantizedLinear
from qlinear_service.slots import Slab

K = 96


def layers_of_all_kinds() -> list[QuantizedLinear]:
    """With bias, ordered, of 8 bits, of features that three cannot share evenly, of few, plain."""

    def made(module: str, n: int, **more: Any) -> LogicalLayer:
        return random_layer(n=n, k=K, group_size=32, module=module, seed=n, **more)

    return [
        pack(layer)
        for layer in (
            made("up", 320, bias=True),
            made("ordered", 200, permuted=True, symmetric=False),
            made("wide", 257, bits=8, bias=True, scale_dtype=DType.BF16),
            made("narrow", 24, bias=True),
            unquantized_layer(n=130, k=K, bias=True, module="plain"),
        )
    ]


LAYERS = {layer.spec.name: layer for layer in layers_of_all_kinds()}


def cpu_kernels() -> CpuKernels:
    """Return the kernels of this machine; skips where there is no compiler."""
    try:
        with build.cpu_library(build.default_cache_dir()) as path:
            return CpuKernels(path, threads=1)
    except build.ToolMissing as missing:
        pytest.skip(str(missing))


def split_over(gpus: Sequence[FakeGpu]) -> tuple[SplitDevice, LayerRegistry]:
    """Return the GPUs as one device, and the layers that are shared out over them."""
    split = SplitDevice({f"cuda:{place}": gpu for place, gpu in enumerate(gpus)})
    registry = LayerRegistry()
    for layer in LAYERS.values():
        whole = outline(layer)
        parts = [
            Piece(place, begin, end, layer.features(begin, end))
            for place, (begin, end) in enumerate(ranges(layer.spec, len(gpus)))
            if begin < end
        ]
        split.add(whole, parts)
        registry.add(whole)
    return split, registry


def draw(seed: int, rows: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn((rows, K), generator=torch.Generator().manual_seed(seed)).to(dtype)


class Bench:
    """GPUs that share out each layer, an engine over them, and a slab."""

    def __init__(self, count: int = 2, mode: str = AUTO, **options: Any) -> None:
        self.kernels = cpu_kernels()
        self.gpus = [FakeGpu(self.kernels.linear) for _ in range(count)]
        self.slab = Slab(capacity_bytes=1 << 26, largest_bytes=1 << 22)
        self.split, self.registry = split_over(self.gpus)
        self.engine = GpuEngine(
            device=self.split, registry=self.registry, slab=self.slab, mode=mode, **options
        )
        self.numbers = itertools.count(1)

    def batch(self, name: str, *xs: torch.Tensor, output: DType = DType.F32) -> Batch:
        dtype = next(each for each in DType if to_torch(each) == xs[0].dtype)
        key = BatchKey(name, dtype, output)
        return batch_of(self.slab, self.numbers, key, xs)

    async def check(self, name: str, *xs: torch.Tensor, run: Any = None) -> None:
        """Compute and compare every bit with the whole layer on the CPU."""
        batch = self.batch(name, *xs)
        result = await (run or self.engine.run)(batch)
        assert not result.in_slots
        joined = torch.frombuffer(bytearray(b"".join(result.rows)), dtype=torch.float32)
        expected = self.kernels.linear(LAYERS[name], torch.cat(xs), DType.F32)
        assert torch.equal(joined.view(expected.shape), expected)
        for part, x in zip(batch.parts, xs, strict=True):
            assert bytes(self.slab.view(part.item.slot)[: x.nbytes]) == data_of(x), "written over"
            self.slab.release(part.item.slot)


def data_of(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def batch_of(
    slab: Slab, numbers: Iterator[int], key: BatchKey, xs: Sequence[torch.Tensor]
) -> Batch:
    """Return a batch of one item for each x."""
    parts = []
    for x in xs:
        data = data_of(x)
        slot = slab.acquire(len(data))
        slab.view(slot)[: len(data)] = data
        item = WorkItem(
            sequence=next(numbers), key=key, rows=len(x), slot=slot, nbytes=len(data),
            enqueued_at=0.0,
        )  # fmt: skip
        parts.append(Part(item, 0, len(x)))
    return Batch(key, tuple(parts), sum(map(len, xs)))


@contextlib.contextmanager
def benches() -> Iterator[Any]:
    """Yield what makes benches, and see that all is given back."""
    made: list[Bench] = []

    def make(*words: Any, **options: Any) -> Bench:
        made.append(Bench(*words, **options))
        return made[-1]

    yield make
    for bench in made:
        for gpu in bench.gpus:
            open_gates(gpu)
        assert bench.engine.stop(5)
        assert bench.engine._stages.free == bench.engine.stage_count
        if not any(gpu.lost for gpu in bench.gpus):
            assert all(gpu.admitted == (0, 0) for gpu in bench.gpus)


async def all_of(runner: BatchRunner, batches: Sequence[Batch]) -> list[Any]:
    """Run batches at the same time; return results and errors."""
    return await asyncio.gather(*map(runner.run, batches), return_exceptions=True)
