"""Engines on fake GPUs with layers that share x and such that do not, a slab and a batcher."""

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import torch
from fake_gpu import FakeGpu, open_gates
from gpu_bench import K
from measured_layers import metrics_of
from random_layers import random_layer, unquantized_layer
from told import told_by

from qlinear_service.batcher import Batcher
from qlinear_service.batching import Batch, BatchKey, Part, WorkItem, WorkQueue
from qlinear_service.dtypes import DType
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.gpu.replicas import ReplicaRunner
from qlinear_service.gpu.ways import SLAB
from qlinear_service.kernels import reference
from qlinear_service.kernels.packing import pack
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerRegistry, QuantizedLinear
from qlinear_service.measured import MeasuredDevice
from qlinear_service.results import Outcome
from qlinear_service.slots import Slab

Q, WIDE, SMALL = "test/q", "test/wide", "test/small"
ORDERED, ORDERED_TOO, OTHER_ORDER = "test/ordered", "test/ordered_too", "test/other_order"
BF16, DENSE, LONGER = "test/bf16", "test/dense", "test/longer"


def _layers() -> list[QuantizedLinear]:
    def made(name: str, n: int, order: torch.Tensor | None = None, **more: Any) -> QuantizedLinear:
        module = name.removeprefix("test/")
        layer = random_layer(**{"n": n, "k": K, "group_size": 32, **more}, module=module)
        return pack(layer if order is None else replace(layer, k_permutation=order.clone()))

    order = torch.randperm(K, generator=torch.Generator().manual_seed(9)).int()
    return [
        made(Q, 24), made(WIDE, 200, seed=1), made(SMALL, 7, seed=2),
        made(ORDERED, 24, order, permuted=True),
        made(ORDERED_TOO, 70, order, permuted=True, seed=3),
        made(OTHER_ORDER, 24, permuted=True, seed=5), made(BF16, 24, scale_dtype=DType.BF16),
        pack(unquantized_layer(n=24, k=K, module="dense")), made(LONGER, 24, k=2 * K),
    ]  # fmt: skip


LAYERS = {layer.spec.name: layer for layer in _layers()}


class Bench:
    """An engine over a fake GPU, its slab, and a batcher that sends layers of a call as one."""

    def __init__(self, mode: str = SLAB, chained: int = 3, count: int = 1) -> None:
        self.gpus = [FakeGpu() for _ in range(count)]
        self.gpu = self.gpus[0]
        self.slab = Slab(capacity_bytes=1 << 26, largest_bytes=1 << 22)
        self.numbers = itertools.count(1)
        self.engines = {
            f"cuda:{place}": GpuEngine(
                device=gpu, registry=LayerRegistry(LAYERS.values()), slab=self.slab, stages=2,
                chained=chained, mode=mode,
            )
            for place, gpu in enumerate(self.gpus)
        }  # fmt: skip
        self.engine = self.engines["cuda:0"]
        runner = self.engine if count == 1 else ReplicaRunner(self.engines)
        self.metrics = metrics_of(devices=[MeasuredDevice(name=name) for name in self.engines])
        self.metrics.layers = dict(LAYERS)
        self.batcher = Batcher(
            queue=WorkQueue(max_batch_rows=64, max_queue_rows=1 << 20, max_age_seconds=60),
            run_batch=runner.run,
            release=lambda item: self.slab.release(item.slot),
            clock=asyncio.get_running_loop().time,
            metrics=self.metrics,
            most_running=runner.most_in_flight,
            most_chained=runner.most_chained,
            together=runner,
        )
        self.task = asyncio.create_task(self.batcher.run())

    def items(self, x: torch.Tensor, *names: str, output: DType = DType.F16) -> list[WorkItem]:
        data = x.contiguous().view(torch.uint8).numpy().tobytes()
        slot = self.slab.acquire(len(data), users=len(names))
        self.slab.view(slot)[: len(data)] = data
        x_dtype = next(dtype for dtype in DType if to_torch(dtype) == x.dtype)
        return [
            WorkItem(
                sequence=next(self.numbers), key=BatchKey(name, x_dtype, output), rows=len(x),
                slot=slot, nbytes=len(data), enqueued_at=asyncio.get_running_loop().time(),
            )
            for name in names
        ]  # fmt: skip

    def call(self, x: torch.Tensor, *names: str, **more: Any) -> asyncio.Future[list[Outcome]]:
        return told_by(self.batcher.submit, self.items(x, *names, **more))

    async def reached(self, step: str, count: int) -> None:
        await asyncio.to_thread(self.gpu.until, step, count)

    def batches(self, x: torch.Tensor, *names: str, **more: Any) -> list[Batch]:
        """Return a batch of each layer, all of the same call."""
        items = self.items(x, *names, **more)
        return [Batch(item.key, (Part(item, 0, item.rows),), item.rows) for item in items]

    async def end(self) -> None:
        for gpu in self.gpus:
            open_gates(gpu)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        for engine in self.engines.values():
            assert engine.stop(5)
            assert engine._stages.free == engine.stage_count


def check(outcome: Outcome, x: torch.Tensor, name: str, output: DType = DType.F16) -> None:
    data = bytearray(b"".join(outcome.pieces))
    y = torch.frombuffer(data, dtype=to_torch(output)).view(len(x), -1).float()
    expected = reference.linear(LAYERS[name], x, output_dtype=output).float()
    assert y.shape == expected.shape
    assert torch.allclose(y, expected, rtol=1e-2, atol=1e-2)


def layers_of(gpu: FakeGpu) -> list[list[str]]:
    """Return the layers of each trip."""
    return [[product.layer.spec.module for product in trip.products] for trip in gpu.trips]
