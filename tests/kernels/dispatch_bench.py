"""The native dispatcher over a library that pretends to be a GPU's, with slab and batcher above."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeAlias

import torch
from fake_cuda import HostKernels
from measured_layers import metrics_of
from random_layers import random_layer, unquantized_layer
from told import Told, told_by

from qlinear_service.batching import BatchKey, WorkItem
from qlinear_service.config import BatchingConfig, KernelConfig, LimitsConfig, ServiceConfig
from qlinear_service.dispatch.batcher import DispatchBatcher
from qlinear_service.dtypes import DType
from qlinear_service.engine import WorkerThread
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.kernels import reference
from qlinear_service.kernels.packing import pack
from qlinear_service.kernels.torch_kernels import TorchKernels
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerRegistry
from qlinear_service.loaded import Loaded
from qlinear_service.results import Outcome
from qlinear_service.runners import new_batching
from qlinear_service.slots import Slab

K, N = 40, 24
PLAIN = pack(random_layer(n=N, k=K, group_size=32, bias=True, module="plain"))
ORDERED = pack(random_layer(n=N, k=K, group_size=32, permuted=True, module="ordered"))
DENSE = pack(unquantized_layer(n=N, k=K, module="dense"))
SECOND = pack(random_layer(n=N, k=K, group_size=32, module="second", seed=2))
LAYERS = {layer.spec.name: layer for layer in (PLAIN, ORDERED, DENSE, SECOND)}
PLAIN_NAME, ORDERED_NAME, DENSE_NAME, SECOND_NAME = LAYERS


class DispatchBench:
    """A server's inside without gRPC."""

    def __init__(
        self, kernels: HostKernels, *, age: float = 60.0, spins: bool = False, **batching: Any
    ) -> None:
        self.library = kernels.library
        self.library.fake_rows_reset()
        self.slab = Slab(capacity_bytes=1 << 26, largest_bytes=1 << 22)
        self.worker = WorkerThread("engine")
        self.metrics = metrics_of()
        self.metrics.layers = LAYERS
        self.clock = asyncio.get_running_loop().time
        self.numbers = itertools.count(1)
        self.released: list[int] = []
        config = ServiceConfig(
            kernels=KernelConfig(device="cuda:0"),
            batching=BatchingConfig(dispatcher="native", **batching),
            limits=LimitsConfig(max_queue_age_seconds=age, max_request_rows=1000),
        )
        streams = CudaStreams(kernels)
        streams.spins = spins
        self.batching = new_batching(
            Loaded(
                registry=LayerRegistry(LAYERS.values()),
                kernels=TorchKernels(),
                gpu=streams,
            ),
            config,
            self.slab,
            self.worker,
            clock=self.clock,
            metrics=self.metrics,
        )
        assert isinstance(self.batching.batcher, DispatchBatcher)
        self.batcher = self.batching.batcher
        self.native = self.batcher._native
        self.batcher._ledger._release = self.release
        self.task = asyncio.create_task(self.batcher.run())

    def release(self, item: WorkItem) -> None:
        self.released.append(item.sequence)
        record = self.slab._records[item.slot.index]
        if record.users == 1:
            # Whoever gets the memory next writes into it at once.
            self.slab.view(item.slot)[:] = b"\xff" * record.class_bytes
        self.slab.release(item.slot)

    def items(
        self, x: torch.Tensor, names: Sequence[str], output: DType = DType.F16, **more: Any
    ) -> list[WorkItem]:
        data = x.contiguous().view(torch.uint8).numpy().tobytes()
        room = max(len(data), len(names) * len(x) * N * output.itemsize)
        slot = self.slab.acquire(room, users=len(names))
        self.slab.view(slot)[: len(data)] = data
        x_dtype = next(dtype for dtype in DType if to_torch(dtype) == x.dtype)
        return [
            WorkItem(
                sequence=next(self.numbers), key=BatchKey(name, x_dtype, output), rows=len(x),
                slot=slot, nbytes=len(data), enqueued_at=self.clock(), **more,
            )
            for name in names
        ]  # fmt: skip

    def submit(self, items: Sequence[WorkItem]) -> Told:
        return told_by(self.batcher.submit, items)

    def call(self, x: torch.Tensor, *names: str, **more: Any) -> Told:
        return self.submit(self.items(x, names or (PLAIN_NAME,), **more))

    async def all_left(self) -> None:
        """Wait until nothing is held."""
        while self.batcher.items_held:
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        assert self.batching.stop(5)
        self.worker.stop(5)


def rows(seed: int, count: int = 1, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn((count, K), generator=draw).to(dtype)


def expected(name: str, x: torch.Tensor, output: DType = DType.F16) -> torch.Tensor:
    return reference.linear(LAYERS[name], x, output_dtype=output)


def check(outcome: Outcome, x: torch.Tensor, name: str, output: DType = DType.F16) -> None:
    data = bytearray(b"".join(outcome.pieces))
    y = torch.frombuffer(data, dtype=to_torch(output)).view(-1, N)
    torch.testing.assert_close(y.float(), expected(name, x, output).float(), rtol=1e-2, atol=2e-3)


Make: TypeAlias = Callable[..., DispatchBench]


@contextlib.asynccontextmanager
async def dispatch_benches(kernels: HostKernels) -> AsyncIterator[Make]:
    """Yield what makes benches, and see that each has given everything back, once."""
    made: list[DispatchBench] = []

    def make(**options: Any) -> DispatchBench:
        made.append(DispatchBench(kernels, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.library.fake_hang(0)
        await bench.close()
        assert len(bench.released) == len(set(bench.released)), "a slot was released twice"


__all__ = [
    "DENSE_NAME",
    "LAYERS",
    "ORDERED_NAME",
    "PLAIN",
    "PLAIN_NAME",
    "SECOND_NAME",
    "DispatchBench",
    "K",
    "Make",
    "N",
    "Told",
    "check",
    "dispatch_benches",
    "rows",
]  # fmt: skip
