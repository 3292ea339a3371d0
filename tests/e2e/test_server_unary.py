"""Unary calls over a real connection: right answers, and nobody gets another one's rows."""

import asyncio
import itertools

import pytest
import torch
from running_server import K, Running, Start, assert_close, decode

from qlinear.v1 import linear_pb2 as pb
from qlinear_service import __version__
from qlinear_service.config import BatchingConfig
from qlinear_service.dtypes import DType
from qlinear_service.kernels.torch_types import to_torch


@pytest.mark.parametrize("output_dtype", [None, *DType])
@pytest.mark.parametrize("dtype", list(DType))
async def test_right_answers_for_all_dtypes_and_shapes(
    running: Running, dtype: DType, output_dtype: DType | None
) -> None:
    for leading in ((), (1,), (5,), (2, 3), (1, 1, 4)):
        x = torch.randn(*leading, K).to(to_torch(dtype))
        request = running.request("one/up", x, output_dtype=output_dtype or 0)
        response = await running.stub.MatMul(request)
        (y,) = map(decode, response.y)
        assert_close(y, running.expected("one/up", x, output_dtype or dtype))
        assert not response.timings


async def test_zero_rows_are_answered_without_the_engine(running: Running) -> None:
    for leading in ((0,), (3, 0), (0, 3)):
        x = torch.empty(*leading, K).half()
        up, down = await running.matmul(["one/up", "one/down"], x)
        assert (up.shape, down.shape) == ((*leading, 40), (*leading, 24))
    assert running.kernels.batches == []


async def test_several_layers_on_one_x_in_the_order_asked(running: Running) -> None:
    x = torch.randn(3, K).half()
    names = ["one/down", "two/down", "one/up", "one/down"]
    results = await running.matmul(names, x)
    for name, y in zip(names, results, strict=True):
        assert_close(y, running.expected(name, x))


async def test_a_bare_name_works_where_one_model_has_it(running: Running) -> None:
    x = torch.randn(2, K).half()
    (y,) = await running.matmul("up", x)
    assert_close(y, running.expected("one/up", x))


async def test_a_request_larger_than_a_batch_is_cut_and_joined(start: Start) -> None:
    running = await start(batching=BatchingConfig(max_batch_rows=4))
    busy = await running.hold()
    x, other = torch.randn(2, 5, K).half(), torch.randn(2, K).half()
    tasks = [asyncio.create_task(running.matmul("one/up", part)) for part in (x, other)]
    await running.until_queued(12)
    running.kernels.gate.set()
    (y,), (small,) = await asyncio.gather(*tasks)
    await busy
    assert_close(y, running.expected("one/up", x))
    assert_close(small, running.expected("one/up", other))
    assert [len(batch) for _, batch in running.kernels.batches] == [1, 4, 4, 4]


async def test_what_waits_for_one_layer_is_one_batch(running: Running) -> None:
    busy = await running.hold()
    xs = [torch.randn(rows, K).half() for rows in (1, 2, 3)]
    calls = [
        running.stub.MatMul(running.request("one/up", x), metadata=(("qlinear-want-timing", "1"),))
        for x in xs
    ]
    # Another layer and another dtype are other batches.
    others = [
        asyncio.create_task(running.matmul("one/down", xs[0])),
        asyncio.create_task(running.matmul("one/up", xs[0].float())),
    ]
    await running.until_queued(8)
    running.kernels.gate.set()
    for x, call in zip(xs, calls, strict=True):
        response = await call
        assert_close(decode(response.y[0]), running.expected("one/up", x))
        (timing,) = response.timings
        assert timing.layer == "one/up"
        assert timing.batch_rows == 6
        assert 0 < timing.kernel_nanoseconds < timing.total_nanoseconds
        assert 0 < timing.queue_nanoseconds < timing.total_nanoseconds
    await asyncio.gather(busy, *others)
    assert len(running.kernels.batches) == 4


async def test_many_clients_are_batched_and_never_mixed_up(running: Running) -> None:
    names = ("one/up", "one/down", "two/down")
    numbers = itertools.count()

    async def client() -> None:
        for _ in range(8):
            number = next(numbers)
            name = names[number % 3]
            x = torch.randn(number % 4 + 1, K).to(to_torch(DType(number % 3 + 1)))
            (y,) = await running.matmul(name, x)
            assert_close(y, running.expected(name, x))

    await asyncio.gather(*(client() for _ in range(40)))
    assert len(running.kernels.batches) < 320


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
async def test_nan_and_infinity_pass_through_and_touch_no_other_row(
    running: Running, bad: float
) -> None:
    busy = await running.hold()
    xs = [torch.randn(2, K).half() for _ in range(3)]
    xs[1][1, 7] = bad
    tasks = [asyncio.create_task(running.matmul("one/up", x)) for x in xs]
    await running.until_queued(6)
    running.kernels.gate.set()
    results = [y for (y,) in await asyncio.gather(*tasks)]
    await busy
    assert len(running.kernels.batches) == 2
    assert not results[1][1].isfinite().any()
    results[1] = results[1][:1]
    for x, y in zip(xs, results, strict=True):
        assert_close(y, running.expected("one/up", x[: len(y)]))


async def test_list_layers_describes_and_filters(running: Running) -> None:
    listed = (await running.stub.ListLayers(pb.ListLayersRequest())).layers
    assert [layer.name for layer in listed] == ["one/down", "one/up", "two/down", "two/wide"]
    up = listed[1]
    assert (up.model, up.n, up.k, up.bits, up.group_size) == ("one", 40, K, 4, 32)
    assert (up.symmetric, up.has_bias, up.scale_dtype, up.device) == (True, True, 1, "cpu")
    assert up.packed_bytes == running.registry.resolve("one/up").packed_bytes > 0
    filtered = (await running.stub.ListLayers(pb.ListLayersRequest(model="two"))).layers
    assert [layer.name for layer in filtered] == ["two/down", "two/wide"]


async def test_server_info_tells_the_limits_that_hold(running: Running) -> None:
    info = await running.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info.version == __version__
    assert (info.device, list(info.models), info.layout_version) == ("cpu", ["one", "two"], 1)
    assert (info.max_message_bytes, info.max_request_bytes) == (64 << 20, 32 << 20)
    assert (info.max_request_rows, info.max_response_bytes) == (65536, 256 << 20)
    assert not info.batch_invariant
