"""The client's end of a MatMulStream, message by message, for tests of the server."""

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
import torch
from running_server import WAIT_SECONDS, Running, decode

from qlinear.v1 import linear_pb2 as pb

PATH = "/qlinear.v1.QuantizedLinear/MatMulStream"


@dataclass
class Peer:
    """One stream; ids are the test's own."""

    running: Running
    call: Any

    async def send(self, request_id: int, layers: Any, x: torch.Tensor, **more: Any) -> None:
        """Send one call."""
        request = self.running.request(layers, x)
        await self.write(pb.StreamRequest(request_id=request_id, call=request, **more))

    async def cancel(self, request_id: int) -> None:
        """Take one call back."""
        await self.write(pb.StreamRequest(request_id=request_id, cancel=pb.Cancel()))

    async def write(self, message: pb.StreamRequest | bytes) -> None:
        """Send any message, or bytes that may be none."""
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        await asyncio.wait_for(self.call.write(raw), WAIT_SECONDS)

    async def read(self) -> pb.StreamResponse:
        """Return the next answer."""
        raw = await asyncio.wait_for(self.call.read(), WAIT_SECONDS)
        assert raw is not grpc.aio.EOF, "the server ended the stream"
        return pb.StreamResponse.FromString(raw)

    async def result(self, request_id: int) -> list[torch.Tensor]:
        """Return the next answer, which must be the result of this id."""
        response = await self.read()
        assert (response.request_id, response.WhichOneof("outcome")) == (request_id, "result")
        return [decode(tensor) for tensor in response.result.y]

    async def error(self, request_id: int) -> pb.Error:
        """Return the next answer, which must be the error of this id."""
        response = await self.read()
        assert (response.request_id, response.WhichOneof("outcome")) == (request_id, "error")
        return response.error

    async def going_away(self) -> None:
        """Check that the next message says so."""
        assert await self.read() == pb.StreamResponse(going_away=pb.GoingAway())

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        """Return the status of the stream, before which nothing more may come."""
        try:
            raw = await asyncio.wait_for(self.call.read(), WAIT_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        assert raw is grpc.aio.EOF, pb.StreamResponse.FromString(raw)
        return await self.call.code(), await self.call.details()

    async def lives_on(self, request_id: int = 1 << 63) -> None:
        """Check that a plain call on this very stream is answered rightly."""
        x = torch.ones(2, 96).half()
        await self.send(request_id, "one/up", x)
        (y,) = await self.result(request_id)
        torch.testing.assert_close(y, self.running.expected("one/up", x), rtol=2e-3, atol=2e-3)


def open_stream(running: Running, **options: Any) -> Peer:
    """Open a stream of raw bytes on the running server's channel."""
    return Peer(running, running.channel.stream_stream(PATH)(**options))


async def until(condition: Any) -> None:
    """Wait until `condition()` holds."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


def slab_of(running: Running) -> Any:
    """Return the server's slab."""
    serving = running.server._servicer._serving
    assert serving is not None
    return serving.transport._slab  # type: ignore[attr-defined]


__all__ = ["PATH", "Peer", "open_stream", "slab_of", "until"]
