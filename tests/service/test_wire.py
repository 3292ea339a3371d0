"""Reading calls without copying says what protobuf says, of every message and every broken one."""

import time

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from qlinear.v1 import linear_pb2 as pb
from qlinear_service import wire

names = st.text(max_size=12)
tensors = st.builds(
    pb.Tensor,
    dtype=st.integers(0, 7),
    shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    data=st.binary(max_size=40),
)
calls = st.builds(
    pb.MatMulRequest,
    layer=names,
    layers=st.lists(names, max_size=3),
    output_dtype=st.integers(-3, 2**31 - 1),
    priority=st.integers(0, 2**32 - 1),
    x=st.one_of(st.none(), tensors),
)
messages = st.builds(
    pb.StreamRequest,
    request_id=st.integers(0, 2**64 - 1),
    timeout_nanoseconds=st.integers(0, 2**64 - 1),
    traceparent=names,
    want_timing=st.booleans(),
    call=st.one_of(st.none(), calls),
)


@given(call=calls)
def test_a_viewed_call_is_what_protobuf_reads(call: pb.MatMulRequest) -> None:
    viewed = wire._viewed(wire._view_call, call.SerializeToString())
    if viewed is None:  # numbers of 32 bits and negative ones are left to protobuf
        assert call.priority >= 2**31 or call.output_dtype < 0
    else:
        assert viewed == wire._fields_of(call)


@given(message=messages)
def test_a_viewed_stream_message_is_what_protobuf_reads(message: pb.StreamRequest) -> None:
    raw = message.SerializeToString()
    viewed = wire._viewed(wire._view_stream_message, raw)
    if viewed is not None:
        assert viewed == wire.read_stream_message(raw)
    else:
        assert message.call.priority >= 2**31 or message.call.output_dtype < 0


@settings(max_examples=400)
@given(message=messages, cut=st.integers(0, 400), flips=st.lists(st.integers(0, 3000), max_size=3))
def test_of_broken_messages_the_viewer_never_says_more_than_protobuf(
    message: pb.StreamRequest, cut: int, flips: list[int]
) -> None:
    raw = bytearray(message.SerializeToString()[: cut or None])
    for flip in flips:
        if flip // 8 < len(raw):
            raw[flip // 8] ^= 1 << flip % 8
    viewed = wire._viewed(wire._view_stream_message, bytes(raw))
    if viewed is None:
        return
    try:
        expected = wire.read_stream_message(bytes(raw))
    except DecodeError:
        pytest.fail(f"protobuf refuses what was read as {viewed}")
    assert viewed == expected


def test_fields_that_come_twice_or_are_unknown_are_left_to_protobuf() -> None:
    x = pb.MatMulRequest(x=pb.Tensor(dtype=1, shape=[1])).SerializeToString()
    twice = x + pb.MatMulRequest(x=pb.Tensor(shape=[2])).SerializeToString()
    assert wire._viewed(wire._view_call, twice) is None
    assert wire.read_call(twice).shape == (1, 2)
    unknown = x + bytes((9 * 8, 5))
    assert wire._viewed(wire._view_call, unknown) is None
    assert wire.read_call(unknown).shape == (1,)


def test_the_data_of_large_messages_is_a_view_of_the_received_bytes() -> None:
    data = np.arange(wire.VIEW_FROM_BYTES, dtype=np.uint8).tobytes()
    raw = pb.MatMulRequest(
        layer="m/a", x=pb.Tensor(dtype=1, shape=[8], data=data)
    ).SerializeToString()
    fields = wire.read_call(raw)
    assert fields.data == data
    assert np.shares_memory(np.frombuffer(fields.data, np.uint8), np.frombuffer(raw, np.uint8))
    outer = pb.StreamRequest(request_id=3, call=pb.MatMulRequest.FromString(raw))
    raw = outer.SerializeToString()
    call = wire.read_stream_message(raw).call
    assert call is not None
    assert np.shares_memory(np.frombuffer(call.data, np.uint8), np.frombuffer(raw, np.uint8))


def test_a_message_that_is_none_is_refused() -> None:
    for raw in (b"\xff" * 20, b"\xff" * (wire.VIEW_FROM_BYTES + 1), b"\x0a\x05abc"):
        with pytest.raises(DecodeError):
            wire.read_call(raw)
        with pytest.raises(DecodeError):
            wire.read_stream_message(raw)


@given(
    tensors=st.lists(
        st.tuples(
            st.integers(1, 3), st.lists(st.integers(0, 2**40), max_size=4), st.binary(max_size=300)
        ),
        max_size=3,
    ),
    request_id=st.integers(1, 2**64 - 1),
)
def test_what_is_written_is_what_protobuf_reads(
    tensors: list[tuple[int, list[int], bytes]], request_id: int
) -> None:
    parts: wire.Parts = []
    for dtype, shape, data in tensors:
        parts += [wire.tensor_head(dtype, tuple(shape), len(data)), memoryview(data)]
    expected = pb.MatMulResponse(
        y=[pb.Tensor(dtype=d, shape=s, data=data) for d, s, data in tensors]  # type: ignore[arg-type]
    )
    assert pb.MatMulResponse.FromString(b"".join(parts)) == expected
    response = pb.StreamResponse.FromString(wire.stream_result(request_id, parts))
    assert response == pb.StreamResponse(request_id=request_id, result=expected)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x12\x01a" * 3_000_000,
        pb.MatMulRequest(x=pb.Tensor(shape=[1] * 10_000_000)).SerializeToString(),
    ],
    ids=["names", "dimensions"],
)
def test_millions_of_names_or_dimensions_do_not_hold_up_the_event_loop(raw: bytes) -> None:
    """In processor time, as a busy machine must not decide; reading all of them took seconds."""
    started = time.process_time()
    fields = wire.read_call(raw)
    assert time.process_time() - started < 1.0
    assert max(len(fields.layers), len(fields.shape or ())) == wire.MOST_REPEATED
