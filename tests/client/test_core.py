"""The shared core: what is sent, what is refused before sending, how answers and errors read."""

import math
import pickle
from dataclasses import fields
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qlinear_client
from qlinear.v1 import linear_pb2 as pb
from qlinear_client import (
    CallError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    LayerInfo,
    ResourceExhausted,
    ServerInfo,
    Unavailable,
)
from qlinear_client._config import DEFAULT, DEFAULT_RECEIVE_BYTES, channel_options
from qlinear_client._core import Deadline, MatMulCall, Session, call_error, prepare_matmul
from qlinear_client._errors import error_class

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def prepared(layer: Any = "toy/a", x: object = X, **options: Any) -> MatMulCall:
    return prepare_matmul(layer, x, **{"output_dtype": None, "priority": 0, **options})


def answer(shape: list[int], dtype: int = pb.DTYPE_F32, size: int | None = None) -> pb.Tensor:
    count = 4 * math.prod(shape) if size is None else size
    return pb.Tensor(dtype=dtype, shape=shape, data=b"\0" * count)


class FakeRpcError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str, *trailers: tuple[str, str]) -> None:
        self._parts = code, details, trailers

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._parts[2]


def test_request_holds_what_was_asked() -> None:
    one = prepared("toy/a", priority=9, output_dtype="float16").request
    assert one == pb.MatMulRequest(
        layer="toy/a",
        priority=9,
        output_dtype=pb.DTYPE_F16,
        x=pb.Tensor(dtype=pb.DTYPE_F32, shape=[2, 3], data=X.tobytes()),
    )
    several = prepared(["toy/a", "toy/b"]).request
    assert (several.layer, list(several.layers)) == ("", ["toy/a", "toy/b"])
    assert several.output_dtype == pb.DTYPE_UNSPECIFIED


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layer": ""}, "a layer name is empty"),
        ({"layer": ["toy/a", ""]}, "a layer name is empty"),
        ({"layer": []}, "list of layers is empty"),
        ({"layer": [1]}, r"layer is \[1\]; expected a layer name"),
        ({"layer": None}, "layer is None"),
        ({"priority": 10}, "priority is 10; expected 0"),
        ({"priority": -1}, "priority is -1"),
        ({"output_dtype": "int8"}, "dtype int8"),
    ],
)
def test_wrong_arguments_are_refused_before_sending(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        prepared(**arguments)


def test_one_layer_gives_an_array_and_a_list_gives_a_list() -> None:
    assert prepared("a").results_from(pb.MatMulResponse(y=[answer([2, 5])])).shape == (2, 5)
    (only,) = prepared(["a"]).results_from(pb.MatMulResponse(y=[answer([2, 5])]))
    assert only.shape == (2, 5)


@pytest.mark.parametrize(
    "y",
    [
        [],
        [answer([2, 5]), answer([2, 5])],
        [answer([3, 5])],
        [answer([2])],
        [answer([2, 1, 5])],
        [answer([2, 5], size=39)],
        [answer([2, 5], size=41)],
        [answer([2, -5], size=0)],
        [answer([2, 5], dtype=pb.DTYPE_F16, size=20)],
        [answer([2, 5], dtype=7)],
    ],
)
def test_an_answer_that_does_not_fit_is_never_returned(y: list[pb.Tensor]) -> None:
    with pytest.raises(Internal, match="the server"):
        prepared("toy/a").results_from(pb.MatMulResponse(y=y))


@given(
    rows=st.integers(0, 9),
    max_rows=st.integers(0, 9),
    max_bytes=st.integers(0, 120),
)
def test_limits_refuse_exactly_what_is_above_them(rows: int, max_rows: int, max_bytes: int) -> None:
    info = Session("h:1", None).learn(
        pb.GetServerInfoResponse(max_request_rows=max_rows, max_request_bytes=max_bytes)
    )
    refusal = prepared(x=np.zeros((rows, 3), np.float32)).refusal(info)
    fits = (rows <= max_rows or not max_rows) and (rows * 12 <= max_bytes or not max_bytes)
    assert (refusal is None) == fits
    if refusal is not None:
        assert not refusal.retryable
        assert "max_request_" in refusal.message


def test_receive_limit_follows_the_server_and_never_shrinks() -> None:
    session = Session("h:1", None)
    assert session.receive_bytes == DEFAULT_RECEIVE_BYTES
    session.learn(pb.GetServerInfoResponse(max_response_bytes=256 << 20))
    assert session.receive_bytes == DEFAULT_RECEIVE_BYTES > 256 << 20
    session.learn(pb.GetServerInfoResponse(max_response_bytes=1 << 30))
    assert 1 << 30 < session.receive_bytes < (1 << 30) + (2 << 20)
    session.learn(pb.GetServerInfoResponse(max_response_bytes=1))
    assert session.receive_bytes > 1 << 30
    session.learn(pb.GetServerInfoResponse(max_response_bytes=1 << 40))
    assert dict(channel_options(session.receive_bytes))["grpc.max_receive_message_length"] < 1 << 31


def test_deadline_shrinks_and_ends() -> None:
    now = [100.0]
    deadline = Deadline(2.0, lambda: now[0])
    assert deadline.remaining_seconds() == 2.0
    now[0] = 101.5
    assert deadline.remaining_seconds() == 0.5
    now[0] = 102.0
    with pytest.raises(DeadlineExceeded, match="deadline of 2 s passed"):
        deadline.remaining_seconds()
    assert Deadline(None).remaining_seconds() is None


def test_timeout_argument_beats_the_clients_and_none_means_none() -> None:
    session = Session("h:1", 5.0)
    left = session.deadline(DEFAULT).remaining_seconds()
    assert left is not None
    assert 4 < left <= 5
    assert session.deadline(None).remaining_seconds() is None
    left = session.deadline(60).remaining_seconds()
    assert left is not None
    assert left > 50


@pytest.mark.parametrize("timeout", [0, -1.0, math.inf, math.nan])
def test_timeouts_that_mean_nothing_are_refused(timeout: float) -> None:
    with pytest.raises(InvalidArgument, match="timeout is"):
        Session("h:1", timeout)
    with pytest.raises(InvalidArgument, match="timeout is"):
        Session("h:1", None).deadline(timeout)


@pytest.mark.parametrize("target", ["", None, 50051])
def test_target_must_be_text(target: Any) -> None:
    with pytest.raises(InvalidArgument, match="target is"):
        Session(target, None)


def test_every_status_of_the_contract_has_its_class() -> None:
    named = "INVALID_ARGUMENT NOT_FOUND RESOURCE_EXHAUSTED DEADLINE_EXCEEDED CANCELLED UNAVAILABLE"
    rest = "INTERNAL UNIMPLEMENTED UNAUTHENTICATED PERMISSION_DENIED"
    for name in f"{named} {rest}".split():
        kind = error_class(grpc.StatusCode[name])
        assert kind.__name__.upper() == name.replace("_", "")
        assert getattr(qlinear_client, kind.__name__) is kind
    lost = call_error(FakeRpcError(grpc.StatusCode.DATA_LOSS, "gone"))
    assert (type(lost), lost.code, lost.message) == (CallError, grpc.StatusCode.DATA_LOSS, "gone")


PUSHBACK = "grpc-retry-pushback-ms"


@pytest.mark.parametrize(
    ("code", "trailers", "retryable", "after"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, [], False, None),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, [(PUSHBACK, "250")], True, 0.25),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, [("other", "1"), (PUSHBACK, "0")], True, 0.0),
        (grpc.StatusCode.UNAVAILABLE, [], True, None),
        (grpc.StatusCode.CANCELLED, [], True, None),
        (grpc.StatusCode.UNAVAILABLE, [(PUSHBACK, "-1")], False, None),
        (grpc.StatusCode.UNAVAILABLE, [(PUSHBACK, "soon")], False, None),
        (grpc.StatusCode.INVALID_ARGUMENT, [], False, None),
        (grpc.StatusCode.DEADLINE_EXCEEDED, [], False, None),
    ],
)
def test_retryable_is_the_servers_word(
    code: grpc.StatusCode, trailers: list[tuple[str, str]], retryable: bool, after: float | None
) -> None:
    error = call_error(FakeRpcError(code, "text", *trailers))
    assert (error.retryable, error.retry_after_seconds) == (retryable, after)


def test_errors_survive_pickling_and_always_have_words() -> None:
    error = ResourceExhausted("full", retryable=True, retry_after_seconds=0.5)
    again = pickle.loads(pickle.dumps(error))
    assert vars(again) == vars(error)
    assert str(again) == "full"
    assert "UNAVAILABLE" in call_error(FakeRpcError(grpc.StatusCode.UNAVAILABLE, "")).message
    assert Unavailable("x").code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("kind", "message"), [(LayerInfo, pb.Layer), (ServerInfo, pb.GetServerInfoResponse)]
)
def test_info_values_have_the_protocols_fields(kind: type, message: Any) -> None:
    assert [f.name for f in fields(kind)] == [f.name for f in message.DESCRIPTOR.fields]
