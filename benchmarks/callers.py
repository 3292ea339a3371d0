"""Closed loops that keep a number of calls in flight for a while, the same for every server.

`unary` and `stream` send one ready message over generated stubs, so that what they cost is the
transport; `through_client` is what a user's program does.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from qlinear.v1 import linear_pb2 as pb
from qlinear_client import AsyncClient

CALL_SECONDS = 30.0


@dataclass
class Loop:
    """What one loop did."""

    calls: int = 0
    latencies: list[float] = field(default_factory=list)
    """Seconds, one for each call."""

    def note(self, begun: float) -> None:
        """Count a call that ends now."""
        self.calls += 1
        self.latencies.append(time.perf_counter() - begun)

    def percentile(self, percent: float) -> float:
        """Return one percentile of the latencies in seconds."""
        return float(np.percentile(self.latencies, percent))


def matmul_request(layer: str, rows: int, k: int) -> pb.MatMulRequest:
    """Return a call of random float16 activations."""
    x = np.random.default_rng(k).standard_normal((rows, k)).astype(np.float16)
    return pb.MatMulRequest(
        layer=layer, x=pb.Tensor(dtype=pb.DTYPE_F16, shape=x.shape, data=x.tobytes())
    )


async def unary(
    stub: Any, request: pb.MatMulRequest, *, in_flight: int, seconds: float, metadata: Any = ()
) -> Loop:
    """Call MatMul from `in_flight` callers that wait."""

    async def call() -> None:
        response = await stub.MatMul(request, timeout=CALL_SECONDS, metadata=metadata)
        assert response.y

    return await _callers(call, in_flight, seconds)


async def through_client(
    client: AsyncClient, layer: str, x: Any, *, in_flight: int, seconds: float
) -> Loop:
    """Call `client.matmul` from `in_flight` tasks that wait."""

    async def call() -> None:
        await client.matmul(layer, x)

    return await _callers(call, in_flight, seconds)


async def _callers(call: Callable[[], Awaitable[None]], in_flight: int, seconds: float) -> Loop:
    loop = Loop()
    end = time.perf_counter() + seconds

    async def caller() -> None:
        while (begun := time.perf_counter()) < end:
            await call()
            loop.note(begun)

    await asyncio.gather(*(caller() for _ in range(in_flight)))
    return loop


async def serves_stream(stub: Any) -> bool:
    """Say whether a server knows MatMulStream, by a stream without a call."""
    call = stub.MatMulStream(timeout=CALL_SECONDS)
    await call.done_writing()
    code = await call.code()
    if code not in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED):
        raise SystemExit(f"an empty stream ended with {code.name}: {await call.details()}")
    return bool(code is grpc.StatusCode.OK)


async def stream(
    stub: Any,
    request: pb.MatMulRequest,
    *,
    in_flight: int,
    seconds: float,
    traceparent: str = "",
) -> Loop:
    """Keep `in_flight` calls on one MatMulStream: each answer is followed by the next call."""
    loop = Loop()
    begun: dict[int, float] = {}
    end = time.perf_counter() + seconds
    call = stub.MatMulStream(timeout=seconds + CALL_SECONDS)

    async def send(number: int) -> None:
        begun[number] = time.perf_counter()
        message = pb.StreamRequest(request_id=number, call=request, traceparent=traceparent)
        await call.write(message)

    for number in range(1, in_flight + 1):
        await send(number)
    number = in_flight
    while begun:
        response = await call.read()
        assert response is not grpc.aio.EOF, "the server ended the stream"
        assert response.WhichOneof("outcome") == "result", response
        loop.note(begun.pop(response.request_id))
        if time.perf_counter() < end:
            number += 1
            await send(number)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return loop
