"""Calls that break the contract or exceed a limit: each gets its status; the server lives on."""

from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from refused_requests import LIMITS, REFUSED, tensor
from running_server import K, Running, Start, trailers

from qlinear.v1 import linear_pb2 as pb

Code = grpc.StatusCode


async def test_a_broken_contract_gets_its_status_and_words(running: Running) -> None:
    for name, (request, code, text) in REFUSED.items():
        error = await running.refused(request)
        assert error.code() is code, name
        assert text in error.details(), name
        assert not trailers(error), name
    assert running.kernels.batches == []
    await running.lives_on()


async def test_bytes_that_are_no_message_are_invalid(running: Running) -> None:
    call = running.channel.unary_unary("/qlinear.v1.QuantizedLinear/MatMul")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(b"\xff\xff\xff")
    assert refused.value.code() is Code.INVALID_ARGUMENT
    assert "not a valid message" in refused.value.details()
    await running.lives_on()


async def test_an_unknown_model_is_not_found(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="no model is called 'three'; loaded: one, two"):
        await running.stub.ListLayers(pb.ListLayersRequest(model="three"))


@pytest.mark.parametrize(
    ("layers", "shape", "dtype", "text"),
    [
        ("one/up", (11, K), torch.half, "11 rows; at most 10"),
        ("one/up", (5, K), torch.float, "1920 bytes; at most 1536"),
        (["one/up"] * 5, (6, K), torch.half, "30 rows to compute; at most 12"),
        (["one/up", "one/up"], (6, K), torch.half, None),
        ("one/up", (8, K), torch.half, None),
        (["one/up"] * 3, (4, K), torch.float, None),
    ],
)
async def test_limits_are_exact_and_not_retryable(
    start: Start, layers: Any, shape: tuple[int, ...], dtype: torch.dtype, text: str | None
) -> None:
    running = await start(limits=LIMITS)
    x = torch.ones(shape).to(dtype)
    if text is None:
        names = [layers] if isinstance(layers, str) else layers
        assert len(await running.matmul(layers, x)) == len(names)
        return
    error = await running.refused(running.request(layers, x))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert text in error.details()
    assert "grpc-retry-pushback-ms" not in trailers(error)
    await running.lives_on()


async def test_a_large_answer_is_refused_before_it_is_computed(start: Start) -> None:
    running = await start(limits=replace(LIMITS, max_response_bytes=1024))
    error = await running.refused(
        running.request("one/up", torch.ones(8, K).half(), output_dtype=3)
    )
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert "answer would have 1280 bytes; at most 1024" in error.details()
    assert running.kernels.batches == []


async def test_beyond_the_transport_limit_grpc_refuses_and_the_server_lives_on(
    start: Start,
) -> None:
    running = await start(limits=LIMITS)
    request = pb.MatMulRequest(layer="up", x=tensor((1, K), bytes(2 * 1536)))
    error = await running.refused(request)
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()
    await running.lives_on()
