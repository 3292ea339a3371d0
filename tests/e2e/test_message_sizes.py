"""Messages around each limit over a real connection: one byte less, exactly, one byte more."""

import grpc
import pytest
import torch
from running_server import K, Running, Start, assert_close
from stream_peer import open_stream

from qlinear.v1 import linear_pb2 as pb
from qlinear_client import AsyncClient, ResourceExhausted
from qlinear_service.config import LimitsConfig

GRPC_DEFAULT_BYTES = 4 << 20
ROW_BYTES = K * 4
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def of_size(running: Running, nbytes: int, layers: str, **more: int) -> pb.MatMulRequest:
    """A request whose message has exactly so many bytes; x has trailing bytes too many."""
    request = running.request(layers, torch.ones(1, K), **more)
    request.x.data += bytes(nbytes - len(request.x.data) - 64)
    request.x.data += bytes(nbytes - request.ByteSize())
    assert request.ByteSize() == nbytes
    return request


@pytest.mark.parametrize("beyond", [-1, 0, 1])
@pytest.mark.parametrize("limit", [1 << 20, 3 << 20, 32 << 20])
async def test_the_server_takes_messages_up_to_its_limit(
    start: Start, limit: int, beyond: int
) -> None:
    """What gRPC lets through is refused in our words, with the flag's name; the rest in its."""
    running = await start(limits=LimitsConfig(max_request_bytes=limit))
    request = of_size(running, 2 * limit + beyond, "one/up")
    error = await running.refused(request)
    if beyond > 0:
        assert error.code() is EXHAUSTED
        assert f"({2 * limit + 1} vs. {2 * limit})" in error.details()
    else:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"takes {ROW_BYTES} bytes" in error.details()
    await running.lives_on()


@pytest.mark.parametrize("transport", ["stream", "unary"])
async def test_calls_far_beyond_grpcs_default_pass_up_to_our_limit(
    start: Start, transport: str
) -> None:
    """The request and its answer are each larger than the 4 MiB that gRPC takes by default."""
    rows = 5 * GRPC_DEFAULT_BYTES // (4 * ROW_BYTES)
    running = await start(limits=LimitsConfig(max_request_bytes=rows * ROW_BYTES))
    names = ["one/up"] * 3
    x = torch.randn(rows + 1, K)
    async with AsyncClient(f"127.0.0.1:{running.port}", transport=transport) as client:
        for fitting in (x[:-2], x[:-1]):
            assert fitting.nbytes > GRPC_DEFAULT_BYTES
            results = await client.matmul(names, fitting, timeout=20)
            assert sum(y.nbytes for y in results) > GRPC_DEFAULT_BYTES
            expected = running.expected("one/up", fitting[-3:])
            for y in results:
                assert_close(y[-3:], expected)
        computed = len(running.kernels.batches)
        with pytest.raises(ResourceExhausted, match="max_request_bytes"):
            await client.matmul(names, x)
    # Those who do not look at the limits first are told the same by the server.
    if transport == "unary":
        error = await running.refused(running.request(names, x))
        assert error.code() is EXHAUSTED
        text = error.details()
    else:
        peer = open_stream(running)
        await peer.send(1, names, x)
        text = (await peer.error(1)).message
        await peer.lives_on()
        computed += 1
    assert "--max-request-bytes" in text
    assert len(running.kernels.batches) == computed
