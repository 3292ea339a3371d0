"""A server inside the test's own event loop, with kernels that can be held, broken and watched."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from random_layers import random_layer

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_service.config import KernelConfig, ServerConfig, ServiceConfig
from qlinear_service.dtypes import DType
from qlinear_service.kernels import reference
from qlinear_service.kernels.backends import TorchKernels
from qlinear_service.kernels.packing import pack
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerRegistry, QuantizedLinear
from qlinear_service.server import Server

K = 96
WAIT_SECONDS = 20.0


def small_layers() -> list[QuantizedLinear]:
    """Two models; "up" in one of them only, "down" in both; "wide" has another k."""
    shapes = [("one", "up", 40, K), ("one", "down", 24, K), ("two", "down", 16, K)]
    return [
        pack(
            random_layer(n=n, k=k, group_size=32, bias=True, model=model, module=module, seed=seed)
        )
        for seed, (model, module, n, k) in enumerate([*shapes, ("two", "wide", 16, 64)])
    ]


class WatchedKernels(TorchKernels):
    """Plain torch behind a gate; refuses batches that hold the number 13."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.batches: list[tuple[str, torch.Tensor]] = []

    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        self.batches.append((layer.spec.name, x.clone()))
        self.entered.release()
        assert self.gate.wait(WAIT_SECONDS), "the test forgot to open the gate"
        if (x == 13).any():
            raise RuntimeError("secret 13 inside the kernel")
        return super().linear(layer, x, output_dtype)

    def rows_seen(self) -> list[float]:
        """The first element of every row that was computed, in order."""
        return [float(row[0]) for _, x in self.batches for row in x]


@dataclass
class Running:
    """One server, its kernels, and a channel to it."""

    server: Server
    kernels: WatchedKernels
    registry: LayerRegistry
    port: int
    channel: grpc.aio.Channel
    load: Callable[[], Awaitable[None]]
    stub: Any = field(init=False)
    health: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stub = pb_grpc.QuantizedLinearStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def request(
        self, layers: str | Sequence[str], x: torch.Tensor, **more: Any
    ) -> pb.MatMulRequest:
        """Return the message for `x` and one layer or several."""
        dtype = next(dtype for dtype in DType if to_torch(dtype) == x.dtype)
        names = {"layer": layers} if isinstance(layers, str) else {"layers": layers}
        data = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        tensor = pb.Tensor(dtype=dtype.value, shape=x.shape, data=data)
        return pb.MatMulRequest(x=tensor, **names, **more)

    async def matmul(
        self, layers: str | Sequence[str], x: torch.Tensor, *, timeout: float = WAIT_SECONDS
    ) -> list[torch.Tensor]:
        """Return the results of one call."""
        response = await self.stub.MatMul(self.request(layers, x), timeout=timeout)
        return [decode(tensor) for tensor in response.y]

    def expected(
        self, name: str, x: torch.Tensor, output_dtype: DType | None = None
    ) -> torch.Tensor:
        """Return the truth for one layer."""
        layer = self.registry.resolve(name)
        y = reference.linear(layer, x.reshape(-1, layer.spec.k), output_dtype=output_dtype)
        return y.reshape(*x.shape[:-1], layer.spec.n)

    async def refused(
        self, request: pb.MatMulRequest, *, timeout: float = WAIT_SECONDS
    ) -> grpc.aio.AioRpcError:
        """Return the error that a call ends with."""
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.stub.MatMul(request, timeout=timeout)
        return refused.value

    async def lives_on(self) -> None:
        """Check that a plain call of two rows of ones is still answered rightly."""
        x = torch.ones(2, K).half()
        (y,) = await self.matmul("one/up", x)
        assert_close(y, self.expected("one/up", x))

    async def status(self, name: str) -> str:
        """Return what health says under `name`."""
        response = await self.health.Check(health_pb2.HealthCheckRequest(service=name))
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))

    async def hold(self, name: str = "one/up") -> asyncio.Task[list[torch.Tensor]]:
        """Close the gate and keep the engine busy with one call of a row of zeros."""
        self.kernels.gate.clear()
        task = asyncio.create_task(self.matmul(name, torch.zeros(1, K).half()))
        await self.entered()
        return task

    async def entered(self) -> None:
        """Wait until one more batch has reached the kernels."""
        assert await asyncio.to_thread(self.kernels.entered.acquire, timeout=WAIT_SECONDS)

    async def until_queued(self, rows: int) -> None:
        """Wait until so many rows stand in the queue."""
        assert self.server._batching is not None
        batcher = self.server._batching.batcher
        async with asyncio.timeout(WAIT_SECONDS):
            while batcher._queue.rows != rows:
                await asyncio.sleep(0)


def decode(tensor: pb.Tensor) -> torch.Tensor:
    """Return a message's tensor."""
    dtype = to_torch(DType(tensor.dtype))
    if not tensor.data:
        return torch.empty(tuple(tensor.shape), dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).view(tuple(tensor.shape))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the rounding of sums that were added up in another order."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=2 * eps, atol=max(2 * eps, 1e-5))


def trailers(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Return the trailing metadata of an error."""
    return {key: str(value) for key, value in error.trailing_metadata()}


def quick_config(**groups: Any) -> ServiceConfig:
    """Return a configuration for tests: free ports, no delays."""
    server = ServerConfig(
        port=0, metrics_port=0, drain_delay_seconds=0.0, grace_seconds=WAIT_SECONDS
    )
    return replace(ServiceConfig(server=server, kernels=KernelConfig(device="cpu")), **groups)


Start = Callable[..., Awaitable[Running]]
