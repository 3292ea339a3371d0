"""A reader that remembers says what protobuf says, of every message after any others."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from qlinear.v1 import linear_pb2 as pb
from qlinear_service import stream_reader, wire
from qlinear_service.stream_reader import StreamReader

# Few values for each field, so that messages are often of one kind, or nearly.
tensors = st.builds(
    pb.Tensor,
    dtype=st.sampled_from([0, 1, 2, 3, 7, -1, 300]),
    shape=st.sampled_from([[], [0], [4], [2, 2], [-1, 4], [2**62]]),
    data=st.sampled_from([b"", b"abcdefgh", b"\0" * 8, b"12345678", bytes(200)]),
)
calls = st.builds(
    pb.MatMulRequest,
    layer=st.sampled_from(["", "m/a", "m/b", "m/long"]),
    layers=st.sampled_from([[], ["m/a"], ["m/a", "m/b"]]),
    output_dtype=st.sampled_from([0, 3, -2]),
    priority=st.sampled_from([0, 2, 2**32 - 1]),
    x=st.one_of(st.none(), tensors),
)
messages = st.builds(
    pb.StreamRequest,
    request_id=st.sampled_from([0, 1, 127, 128, 12345, 2**64 - 1]),
    timeout_nanoseconds=st.sampled_from([0, 1, 10**10, 2**64 - 1]),
    traceparent=st.sampled_from(["", "00-x"]),
    want_timing=st.booleans(),
    call=st.one_of(st.none(), calls),
)


def read(reader: StreamReader | None, raw: bytes) -> wire.StreamFields | str:
    try:
        return wire.read_stream_message(raw) if reader is None else reader.read(raw)
    except DecodeError:
        return "no message"


@settings(max_examples=300)
@given(several=st.lists(messages, min_size=1, max_size=8))
def test_whatever_came_before_a_message_is_read_as_protobuf_does(
    several: list[pb.StreamRequest],
) -> None:
    reader = StreamReader()
    for message in (*several, *several):
        raw = message.SerializeToString()
        assert read(reader, raw) == read(None, raw)


@settings(max_examples=500)
@given(
    message=messages,
    head=st.binary(max_size=6),
    cut=st.integers(0, 60),
    flips=st.lists(st.integers(0, 600), max_size=3),
    tail=st.binary(max_size=4),
)
def test_of_broken_messages_it_never_says_more_than_protobuf(
    message: pb.StreamRequest, head: bytes, cut: int, flips: list[int], tail: bytes
) -> None:
    reader = StreamReader()
    good = message.SerializeToString()
    reader.read(good)
    broken = bytearray(head + good[: len(good) - cut] + tail)
    for flip in flips:
        if flip // 8 < len(broken):
            broken[flip // 8] ^= 1 << flip % 8
    for raw in (bytes(broken), good, bytes(broken), head + good, good + tail, good[cut:]):
        assert read(reader, raw) == read(None, raw)


def raw_call(request_id: int, data: bytes, **more: object) -> bytes:
    call = pb.MatMulRequest(layer="m/a", x=pb.Tensor(dtype=1, shape=[4], data=data))
    return pb.StreamRequest(request_id=request_id, call=call, **more).SerializeToString()  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [{}, {"timeout_nanoseconds": 10**9}, {"want_timing": True}])
def test_protobuf_is_asked_once_for_each_kind(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, object]
) -> None:
    reader = StreamReader()
    reader.read(raw_call(1, b"abcdefgh", **more))
    monkeypatch.setattr(stream_reader, "read_stream_message", lambda raw: pytest.fail("asked"))
    raw = raw_call(70_000, b"\0\xff345678", **more)
    assert reader.read(raw) == wire.read_stream_message(raw)


def test_an_id_that_comes_twice_is_the_last_one_as_protobuf_has_it() -> None:
    reader = StreamReader()
    raw = raw_call(7, b"abcdefgh")
    for message in (raw, b"\x08\x09" + raw, b"\x08\x09" + raw, raw):
        assert reader.read(message).request_id == 7


@pytest.mark.parametrize("tail", [b"\x20\x01", b"\x72\x00", b"\x7a\x00"], ids=str)
def test_what_follows_a_call_is_never_taken_for_its_data(tail: bytes) -> None:
    """Even if a call of another kind is as long: want_timing, a cancel, and more of the call."""
    reader = StreamReader()
    call, longer = raw_call(1, bytes(8)), raw_call(1, bytes(10))
    for raw in (call, longer, call + tail, call, longer, call + tail):
        assert read(reader, raw) == read(None, raw)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "MOST_KINDS", 10)
    reader = StreamReader()
    for number in range(1, 100):
        raw = raw_call(1, bytes(number))
        assert reader.read(raw) == wire.read_stream_message(raw)
        assert len(reader._kinds) == len(reader._head_bytes) <= 10
    before = dict(reader._kinds)
    call = pb.MatMulRequest(layer="m" * 2000, x=pb.Tensor(dtype=1, shape=[4], data=bytes(8)))
    reader.read(pb.StreamRequest(request_id=1, call=call).SerializeToString())
    reader.read(raw_call(1, bytes(200), traceparent="00-another-one-each-time"))
    assert reader._kinds == before
