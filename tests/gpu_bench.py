"""An engine on a fake GPU, with a slab below it and a batcher in front of it."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import torch
from fake_gpu import FakeGpu, open_gates
from measured_layers import metrics_of
from random_layers import random_layer
from told import told_by

from qlinear_service.batcher import Batcher
from qlinear_service.batching import Batch, BatchKey, Part, WorkItem, WorkQueue
from qlinear_service.dtypes import DType
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.gpu.ways import PINNED, SLAB
from qlinear_service.kernels import reference
from qlinear_service.kernels.packing import pack
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerRegistry
from qlinear_service.results import Outcome
from qlinear_service.roofline import Roofline
from qlinear_service.slots import Slab, Slot

K, N = 40, 24
LAYER = pack(random_layer(n=N, k=K, group_size=32, bias=True))
NAME = LAYER.spec.name
ORDERED = pack(random_layer(n=N, k=K, group_size=32, permuted=True, module="ordered"))
STAGES = 2
QUICK = Roofline(sizes_bytes=(1, 1 << 40), read_seconds=(1e-6, 1e-6), products_per_second=1e15)
"""Of a device on which every batch is quick."""


class Bench:
    """An engine over a fake GPU, its slab, and a batcher in front of it."""

    def __init__(
        self,
        stages: int = STAGES,
        mode: str = PINNED,
        roofline: Roofline | None = None,
        keeps_out: str = "",
        chained: int = 0,
    ) -> None:
        self.gpu = FakeGpu()
        self.gpu.keeps_out = keeps_out
        self.slab = Slab(capacity_bytes=1 << 26, largest_bytes=1 << 22)
        self.numbers = itertools.count(1)
        self.engine = GpuEngine(
            device=self.gpu,
            registry=LayerRegistry([LAYER, ORDERED]),
            slab=self.slab,
            stages=stages,
            chained=chained,
            mode=mode,
            roofline=roofline,
        )
        self.released: list[int] = []
        self.shared: set[Slot] = set()
        """Slots of calls for several layers."""
        self.metrics = metrics_of()
        self.metrics.layers = {layer.spec.name: layer for layer in (LAYER, ORDERED)}
        self.batcher = Batcher(
            queue=WorkQueue(max_batch_rows=64, max_queue_rows=1 << 20, max_age_seconds=60),
            run_batch=self.engine.run,
            release=self.release,
            clock=asyncio.get_running_loop().time,
            metrics=self.metrics,
            most_running=self.engine.most_in_flight,
            run_lone=self.engine.run_lone,
            is_lone=self.engine.is_lone,
            most_chained=self.engine.most_chained,
        )
        self.task = asyncio.create_task(self.batcher.run())

    def release(self, item: WorkItem) -> None:
        self.released.append(item.sequence)
        # Whoever gets the memory next writes into it at once.
        if item.slot not in self.shared or self.slab._records[item.slot.index].users == 1:
            self.slab.view(item.slot)[:] = b"\xff" * len(self.slab.view(item.slot))
        self.slab.release(item.slot)

    def item(self, x: torch.Tensor, name: str = NAME, output: DType = DType.F16) -> WorkItem:
        data = x.contiguous().view(torch.uint8).numpy().tobytes()
        slot = self.slab.acquire(len(data))
        self.slab.view(slot)[: len(data)] = data
        x_dtype = next(dtype for dtype in DType if to_torch(dtype) == x.dtype)
        return WorkItem(
            sequence=next(self.numbers),
            key=BatchKey(name, x_dtype, output),
            rows=len(x),
            slot=slot,
            nbytes=len(data),
            enqueued_at=asyncio.get_running_loop().time(),
        )

    def call(self, x: torch.Tensor, name: str = NAME) -> asyncio.Future[list[Outcome]]:
        return told_by(self.batcher.submit, [self.item(x, name)])

    async def reached(self, step: str, count: int) -> None:
        await asyncio.to_thread(self.gpu.until, step, count)


MakeBench: TypeAlias = Callable[..., Bench]


def rows(seed: int, count: int = 1, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn((count, K), generator=draw).to(dtype)


def check(outcome: Outcome, x: torch.Tensor, name: str = NAME) -> None:
    layer = LAYER if name == NAME else ORDERED
    y = torch.frombuffer(bytearray(b"".join(outcome.pieces)), dtype=torch.float16).view(-1, N)
    assert torch.equal(y, reference.linear(layer, x, output_dtype=DType.F16))


def batch_of(*items: WorkItem) -> Batch:
    parts = tuple(Part(item, 0, item.rows) for item in items)
    return Batch(items[0].key, parts, sum(item.rows for item in items))


@contextlib.asynccontextmanager
async def benches() -> AsyncIterator[MakeBench]:
    """Yield what makes benches that let kernels into the slab, and see that all is given back."""
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**{"mode": SLAB, **options}))
        return made[-1]

    yield make
    for bench in made:
        open_gates(bench.gpu)
        bench.task.cancel()
        await asyncio.gather(bench.task, return_exceptions=True)
        assert bench.engine.stop(5)
        assert bench.engine._stages.free == bench.engine.stage_count
        assert bench.gpu.admitted == (0, 0), "kernels may still write where no slab is any more"
        assert len(bench.released) == len(set(bench.released))
