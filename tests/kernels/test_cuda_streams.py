"""The streams of a GPU and the engine on them, with a library and a torch.cuda that pretend."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fake_cuda import HostKernels, HostStream
from random_layers import random_layer, unquantized_layer

from qlinear_service.batching import Batch, BatchKey, Part, WorkItem
from qlinear_service.dtypes import DType
from qlinear_service.errors import EngineLost
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.gpu.streams import SHORTEST_NANOSECONDS, CudaStreams, Times
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import LayerRegistry
from qlinear_service.slots import Slab

LAYERS = [pack(random_layer(n=24, k=40, group_size=32, permuted=p)) for p in (False, True)]


def run(engine: GpuEngine, slab: Slab, name: str, x: torch.Tensor) -> torch.Tensor:
    data = x.view(torch.uint8).numpy().tobytes()
    slot = slab.acquire(len(data))
    slab.view(slot)[: len(data)] = data
    key = BatchKey(name, DType.F16, DType.F32)
    item = WorkItem(sequence=1, key=key, rows=len(x), slot=slot, nbytes=len(data), enqueued_at=0.0)
    batch = Batch(key, (Part(item, 0, len(x)),), len(x))
    result = asyncio.run(_run(engine, batch))
    return torch.frombuffer(bytearray(b"".join(result)), dtype=torch.float32).view(len(x), -1)


async def _run(engine: GpuEngine, batch: Batch) -> list[bytes]:
    return [bytes(rows) for rows in (await engine.run(batch)).rows]


@contextlib.contextmanager
def engine_on(kernels: HostKernels) -> Iterator[tuple[GpuEngine, Slab]]:
    registry = LayerRegistry()
    for number, layer in enumerate(LAYERS):
        registry._by_name[str(number)] = layer
    slab = Slab(capacity_bytes=1 << 20, largest_bytes=1 << 18)
    engine = GpuEngine(device=CudaStreams(kernels), registry=registry, slab=slab)
    yield engine, slab
    assert engine.stop(5)


def test_a_batch_passes_through_the_streams_in_order(kernels: HostKernels) -> None:
    gpu = CudaStreams(kernels)
    gpu._compute.waited.clear()  # type: ignore[attr-defined] - of its start
    marks = gpu.new_marks()
    x, y = torch.randn(3, 40).half(), torch.empty(3, 24, dtype=torch.float32)
    gpu.copy_in(torch.zeros(8), torch.ones(8), marks)
    gpu.multiply(LAYERS[0], x, y, DType.F32, marks)
    gpu.copy_out(y.view(-1), torch.empty(72), marks)
    gpu.wait(marks)
    gpu.settle()
    assert gpu._compute.waited == [marks.in_stop]  # type: ignore[attr-defined]
    assert gpu._out.waited == [marks.kernel[1]]  # type: ignore[attr-defined]
    assert gpu._in.waited == []  # type: ignore[attr-defined]
    assert torch.equal(y, kernels.linear(LAYERS[0], x, DType.F32))


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_company_changes_no_bit_of_an_unquantized_row_in_batch_invariant_mode(
    kernels: HostKernels, library: Path, batch_invariant: bool
) -> None:
    """Without the mode it does, or nothing would be shown."""
    gpu = CudaStreams(HostKernels(library, batch_invariant=batch_invariant))
    layer = pack(unquantized_layer(n=100, k=1000, bias=True))
    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(2)).half()

    def product(rows: torch.Tensor) -> torch.Tensor:
        y = torch.empty(len(rows), 100, dtype=torch.float32)
        gpu.multiply(layer, rows, y, DType.F32, gpu.new_marks())
        return y

    alone = torch.cat([product(row[None]) for row in x])
    assert torch.equal(product(x), alone) == batch_invariant


def test_a_workspace_is_cleared_in_the_turn_of_its_stream(
    kernels: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch before the failed one may still be counting there."""
    x, stream = torch.randn(3, 40).half(), HostStream()
    kernels.linear(LAYERS[0], x, DType.F32, stream=stream)  # type: ignore[arg-type]
    current: list[object] = []
    zero = torch.Tensor.zero_

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        with kernels.runtime.on(None) as used:
            current.append(used)
        return zero(tensor)

    monkeypatch.setattr(torch.Tensor, "zero_", noted)
    kernels.library.fake_fail(1)
    with pytest.raises(RuntimeError, match="pretended failure"):
        kernels.linear(LAYERS[0], x, DType.F32, stream=stream)  # type: ignore[arg-type]
    assert current == [stream]


def test_the_cost_of_the_pair_is_taken_off(kernels: HostKernels) -> None:
    gpu = CudaStreams(kernels)
    gpu.pair_nanoseconds = 2000
    marks = gpu.new_marks()
    marks.in_stop.milliseconds = 0.003  # type: ignore[attr-defined]
    marks.kernel[1].milliseconds = 0.012  # type: ignore[attr-defined]
    marks.out_stop.milliseconds = 0.004  # type: ignore[attr-defined]
    assert gpu.times(marks) == Times(to_device=3000, kernel=10_000, from_device=4000)
    marks.kernel[1].milliseconds = 0.002  # type: ignore[attr-defined]
    assert gpu.times(marks).kernel == SHORTEST_NANOSECONDS


def test_the_engine_computes_what_the_kernels_do(kernels: HostKernels) -> None:
    with engine_on(kernels) as (engine, slab):
        for number, layer in enumerate(LAYERS):
            for rows in (1, 30):
                x = torch.randn(rows, 40).half()
                y = run(engine, slab, str(number), x)
                assert torch.equal(y, kernels.linear(layer, x, DType.F32))


def test_a_failed_launch_ends_one_batch_and_a_lost_gpu_all(kernels: HostKernels) -> None:
    x = torch.randn(2, 40).half()
    with engine_on(kernels) as (engine, slab):
        kernels.library.fake_fail(1)
        with pytest.raises(RuntimeError, match="pretended failure"):
            run(engine, slab, "0", x)
        assert torch.equal(run(engine, slab, "0", x), kernels.linear(LAYERS[0], x, DType.F32))
        kernels.library.fake_lose()
        for _ in range(2):
            with pytest.raises(EngineLost, match="is lost"):
                run(engine, slab, "0", x)
