"""The least that a grpc.aio server can do: answers every x with the same bytes as y.

Generated stubs, no options, no interceptors: what qlinear's cost of a call is compared with.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc


class Echo(pb_grpc.QuantizedLinearServicer):
    """As many bytes out as in, which is what a square layer does."""

    async def MatMul(self, request: pb.MatMulRequest, context: Any) -> pb.MatMulResponse:
        """Answer one call."""
        return pb.MatMulResponse(y=[request.x])

    async def MatMulStream(
        self, request_iterator: AsyncIterator[pb.StreamRequest], context: Any
    ) -> AsyncIterator[pb.StreamResponse]:
        """Answer each call of a stream, in order."""
        async for request in request_iterator:
            result = pb.MatMulResponse(y=[request.call.x])
            yield pb.StreamResponse(request_id=request.request_id, result=result)


async def main() -> None:
    server = grpc.aio.server()
    pb_grpc.add_QuantizedLinearServicer_to_server(Echo(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
