"""Both clients over real gRPC on loopback, against the fake server of conftest.py.

Each test runs twice: the async client is driven by an event loop behind a blocking face.
"""

import inspect
import time
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import torch

from qlinear.v1 import linear_pb2 as pb
from qlinear_client import (
    AsyncClient,
    CallError,
    Client,
    Internal,
    InvalidArgument,
    LayerInfo,
    NotFound,
    ResourceExhausted,
    _config,
)

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]


@pytest.mark.parametrize("shape", [(6,), (1, 6), (3, 6), (2, 3, 6), (0, 6), (2, 0, 6)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_gives_x_wt(connect: Any, fake: Any, shape: tuple[int, ...], dtype: Any) -> None:
    x = np.random.default_rng(0).integers(-4, 5, shape).astype(dtype)
    y = connect(fake.target).matmul("toy/a", x)
    expected = x.astype(np.float32) @ fake.layers["toy/a"].T
    assert (y.dtype, y.shape) == (x.dtype, (*shape[:-1], 4))
    assert np.array_equal(y.astype(np.float32), expected)
    y[...] = 0  # writable


def test_several_layers_give_results_in_the_order_asked(connect: Any, fake: Any) -> None:
    x = np.ones((2, 6), np.float32)
    results = connect(fake.target).matmul(["toy/b", "toy/a", "toy/b"], x)
    for name, y in zip(["toy/b", "toy/a", "toy/b"], results, strict=True):
        assert np.array_equal(y, x @ fake.layers[name].T)
    assert len(fake.requests) == 1


def test_torch_in_torch_out(connect: Any, fake: Any) -> None:
    x = torch.ones(2, 3, 6, dtype=torch.bfloat16)
    y = connect(fake.target).matmul("toy/a", x, output_dtype=torch.float32)
    assert (type(y), y.dtype) == (torch.Tensor, torch.float32)
    assert torch.equal(y, x.float() @ torch.from_numpy(fake.layers["toy/a"]).T)


def test_options_reach_the_server(connect: Any, fake: Any) -> None:
    x = np.ones((1, 6), np.float16)
    y = connect(fake.target).matmul("toy/a", x, output_dtype="float32", priority=3)
    assert y.dtype == np.float32
    assert (fake.requests[0].priority, fake.requests[0].output_dtype) == (3, pb.DTYPE_F32)


def test_layers_and_server_info(connect: Any, fake: Any) -> None:
    client = connect(fake.target)
    layers = client.list_layers()
    assert [layer.name for layer in layers] == ["toy/a", "toy/b"]
    assert isinstance(layers[0], LayerInfo)
    assert (layers[0].n, layers[0].k, layers[0].scale_dtype) == (4, 6, "bfloat16")
    assert client.list_layers("other") == []
    info = client.server_info()
    assert (info.version, info.models, info.max_request_rows) == ("9.9", ("toy",), 65536)


def test_server_info_is_fetched_once_and_only_when_needed(connect: Any, fake: Any) -> None:
    client = connect(fake.target)
    client.list_layers()
    assert fake.info_calls == 0
    for _ in range(3):
        client.matmul("toy/a", np.ones((1, 6), np.float32))
    assert fake.info_calls == 1


@pytest.mark.parametrize(
    ("limits", "word"),
    [({"max_request_rows": 3}, "4 rows"), ({"max_request_bytes": 95}, "96 bytes")],
)
def test_too_large_is_refused_before_sending(
    connect: Any, fake: Any, limits: dict[str, int], word: str
) -> None:
    client = connect(fake.target)
    x = np.ones((4, 6), np.float32)
    fake.info.MergeFrom(pb.GetServerInfoResponse(**limits))
    with pytest.raises(ResourceExhausted, match=word) as caught:
        client.matmul("toy/a", x)
    assert not caught.value.retryable
    assert fake.requests == []
    # A restart with larger limits is noticed without a new client.
    fake.info.MergeFrom(pb.GetServerInfoResponse(max_request_rows=4, max_request_bytes=96))
    assert client.matmul("toy/a", x).shape == (4, 4)


def test_receive_limit_grows_to_what_the_server_may_send(
    connect: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qlinear_client._core.DEFAULT_RECEIVE_BYTES", 1000)
    monkeypatch.setattr(_config, "DEFAULT_RECEIVE_BYTES", 1000)
    monkeypatch.setattr(_config, "FRAMING_BYTES", 1000)
    x = np.ones((1000, 6), np.float32)
    fake.info.max_response_bytes = 10_000
    client = connect(fake.target)
    with pytest.raises(ResourceExhausted, match="larger than max") as caught:
        client.matmul("toy/a", x)
    assert not caught.value.retryable
    fake.info.max_response_bytes = 16_000
    client.server_info()
    assert client.matmul("toy/a", x).shape == (1000, 4)


@pytest.mark.parametrize("beyond", [-1, 0, 1, 100])
def test_answers_up_to_the_receive_limit_arrive(
    connect: Any, fake: Any, transport: str, monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    """Larger than the 4 MiB that gRPC takes by default, and to the byte."""
    rows = 5 << 16  # of 16 bytes
    x = np.ones((rows, 6), np.float32)
    y = np.float32(x @ fake.layers["toy/a"].T)
    tensor = pb.Tensor(dtype=pb.DTYPE_F32, shape=y.shape, data=y.tobytes())
    fake.reply = pb.MatMulResponse(y=[tensor])
    streamed = pb.StreamResponse(request_id=1, result=fake.reply)
    size = (streamed if transport == "stream" else fake.reply).ByteSize()
    for place in ("qlinear_client._core", "qlinear_client._config"):
        monkeypatch.setattr(f"{place}.DEFAULT_RECEIVE_BYTES", size - beyond)
    fake.info.MergeFrom(pb.GetServerInfoResponse(max_response_bytes=1000, max_request_rows=rows))
    client = connect(fake.target, max_retries=0)
    if beyond > 0 and transport == "unary":
        with pytest.raises(ResourceExhausted, match=f"{size} vs. {size - beyond}"):
            client.matmul("toy/a", x)
    elif beyond == 100:
        # The stream ends, as what was too large for it does not say whose it was.
        with pytest.raises(CallError):
            client.matmul("toy/a", x)
    elif beyond <= 0:
        assert np.array_equal(client.matmul("toy/a", x), y)


def test_calls_are_spread_over_all_addresses(fake: Any, other_fake: Any) -> None:
    """A client of replicas behind one name must not stay with the first that it finds."""
    gives_up = time.monotonic() + 10
    with Client(f"ipv4:{fake.target},{other_fake.target}", transport="unary") as client:
        while not (fake.requests and other_fake.requests):
            client.matmul("toy/a", np.ones((1, 6), np.float32))
            assert time.monotonic() < gives_up, "every call went to one of two servers"


def test_statuses_arrive_as_their_classes(connect: Any, fake: Any, transport: str) -> None:
    client = connect(fake.target, max_retries=0)
    x = np.ones((1, 6), np.float32)
    with pytest.raises(NotFound, match="no layer is called 'toy/zzz'"):
        client.matmul("toy/zzz", x)
    pushback = (("grpc-retry-pushback-ms", "1500"),)
    fake.abort = grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", pushback
    with pytest.raises(ResourceExhausted, match="the queue is full") as full:
        client.matmul("toy/a", x)
    assert (full.value.retryable, full.value.retry_after_seconds) == (True, 1.5)
    fake.abort = grpc.StatusCode.INTERNAL, "incident 7", ()
    with pytest.raises(Internal, match="incident 7") as failed:
        client.matmul("toy/a", x)
    assert not failed.value.retryable
    assert isinstance(failed.value.__cause__, grpc.RpcError) == (transport == "unary")
    assert len(fake.requests) == 3  # nothing was sent twice


def test_mistakes_are_found_before_anything_is_sent(connect: Any, fake: Any) -> None:
    client = connect(fake.target)
    with pytest.raises(InvalidArgument, match="dtype float64"):
        client.matmul("toy/a", np.ones((1, 6)))
    assert (fake.requests, fake.info_calls) == ([], 0)


def test_an_answer_of_another_shape_is_an_error(connect: Any, fake: Any) -> None:
    fake.reply = pb.MatMulResponse(y=[pb.Tensor(dtype=pb.DTYPE_F32, shape=[2, 4], data=bytes(32))])
    with pytest.raises(Internal, match=r"'toy/a' .* shape \[2, 4\]"):
        connect(fake.target).matmul("toy/a", np.ones((1, 6), np.float32))


def public(kind: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in vars(kind).items()
        if callable(member) and (not name.startswith("_") or name == "__init__")
    }


def test_the_twins_have_the_same_methods_signatures_and_words() -> None:
    sync, twin = public(Client), public(AsyncClient)
    assert list(sync) == list(twin)
    for name, method in sync.items():
        assert inspect.signature(method) == inspect.signature(twin[name])
        assert method.__doc__ == twin[name].__doc__
        assert inspect.iscoroutinefunction(twin[name]) == (name != "__init__")
