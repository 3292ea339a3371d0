"""Calls in and results out as bytes of the protocol, without copying activations or results.

protobuf copies a message's bytes at parsing and again at each access. That is cheap for small
messages, which it parses; large ones are read here, field by field, and their data is a view of
the received bytes. Whatever this reader does not expect it leaves to protobuf, so both ways say
the same of every message. Results of any size are written around their bytes, which are joined
once. Knows the wire format (protobuf's encoding guide), no rule of the contract.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from qlinear.v1 import linear_pb2

__all__ = [
    "MOST_REPEATED",
    "VIEW_FROM_BYTES",
    "CallFields",
    "Parts",
    "StreamFields",
    "Unexpected",
    "length_prefix",
    "read_call",
    "read_stream_message",
    "read_varint",
    "stream_result",
    "tensor_head",
]

VIEW_FROM_BYTES = 64 * 1024
"""Reading a header here costs some 4 us more than in protobuf; from here on its copies do."""

MOST_REPEATED = 4096
"""Names and dimensions that are read of one message; no call may have nearly as many, and a message
of the largest size holds millions, which would hold up the event loop for seconds."""

Parts = list[bytes | memoryview]
"""Bytes that follow each other on the wire."""

Fields = TypeVar("Fields")

# Tags: field number * 8 + wire type (0 varint, 2 length and bytes).
_VARINT, _BYTES = 0, 2
_X_OR_DATA_OR_CALL = 15 * 8 + _BYTES  # x, data, call, y and result are all number 15
_X_OR_DATA_OR_CALL_TAG = bytes((_X_OR_DATA_OR_CALL,))
_ID_TAG = bytes((1 * 8 + _VARINT,))


class CallFields(NamedTuple):
    """The fields of a MatMulRequest, believed as far as their types go. `data` is the last."""

    layer: str
    layers: tuple[str, ...]
    """The first `MOST_REPEATED` of them."""
    output_dtype: int
    priority: int
    x_dtype: int
    shape: tuple[int, ...] | None
    """The first `MOST_REPEATED` dimensions; None: x is missing."""
    data: memoryview


class StreamFields(NamedTuple):
    """The fields of a StreamRequest."""

    request_id: int
    timeout_nanoseconds: int
    traceparent: str
    want_timing: bool
    body: str | None
    """"call", "cancel", or None for a body that this server does not know."""
    call: CallFields | None


def read_call(raw: bytes) -> CallFields:
    """Return the fields of a MatMulRequest.

    Raises:
        DecodeError: `raw` is none.
    """
    if len(raw) >= VIEW_FROM_BYTES:
        fields = _viewed(_view_call, raw)
        if fields is not None:
            return fields
    return _fields_of(linear_pb2.MatMulRequest.FromString(raw))


def read_stream_message(raw: bytes) -> StreamFields:
    """Return the fields of a StreamRequest.

    Raises:
        DecodeError: `raw` is none.
    """
    if len(raw) >= VIEW_FROM_BYTES:
        fields = _viewed(_view_stream_message, raw)
        if fields is not None:
            return fields
    message = linear_pb2.StreamRequest.FromString(raw)
    body = message.WhichOneof("body")
    return StreamFields(
        message.request_id,
        message.timeout_nanoseconds,
        message.traceparent,
        message.want_timing,
        body,
        _fields_of(message.call) if body == "call" else None,
    )


def tensor_head(dtype: int, shape: tuple[int, ...], nbytes: int) -> bytes:
    """Return what stands before the `nbytes` bytes of a y in a MatMulResponse, or of x."""
    dims = b"".join(map(_varint, shape))
    dtype_and_tag = bytes((1 * 8 + _VARINT, dtype, 2 * 8 + _BYTES))
    tensor = dtype_and_tag + _varint(len(dims)) + dims + length_prefix(nbytes)
    return length_prefix(len(tensor) + nbytes) + tensor


def stream_result(request_id: int, response: Sequence[bytes | memoryview]) -> bytes:
    """Return the StreamResponse that carries a MatMulResponse given in parts."""
    nbytes = 0
    for part in response:
        nbytes += len(part)
    return b"".join((_ID_TAG, _varint(request_id), length_prefix(nbytes), *response))


def length_prefix(nbytes: int) -> bytes:
    """Return what stands before the `nbytes` bytes of a field of number 15."""
    return _X_OR_DATA_OR_CALL_TAG + _varint(nbytes)


def _varint(value: int) -> bytes:
    if value <= 0x7F:
        return bytes((value,))
    if value <= 0x3FFF:
        return bytes((value & 0x7F | 0x80, value >> 7))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _fields_of(message: linear_pb2.MatMulRequest) -> CallFields:
    has_x = message.HasField("x")
    x = message.x
    return CallFields(
        message.layer,
        tuple(message.layers[:MOST_REPEATED]),
        message.output_dtype,
        message.priority,
        x.dtype,
        tuple(x.shape[:MOST_REPEATED]) if has_x else None,
        memoryview(x.data),  # each access to a bytes field copies it: once only
    )


class Unexpected(Exception):
    """Something that only protobuf knows how to take."""


def _viewed(view: Callable[[memoryview, int, int], Fields], raw: bytes) -> Fields | None:
    """Return what `view` reads, None where protobuf should have a look."""
    try:
        return view(memoryview(raw), 0, len(raw))
    except (Unexpected, IndexError, UnicodeDecodeError):
        return None


def _view_call(raw: memoryview, at: int, end: int) -> CallFields:
    layer, layers = "", []
    output_dtype = priority = 0
    tensor: tuple[int, tuple[int, ...], memoryview] | None = None
    while at < end:
        tag, value, at, stop = _field(raw, at, end)
        if tag == 1 * 8 + _BYTES:
            layer = str(raw[at:stop], "utf-8")
        elif tag == 2 * 8 + _BYTES:
            layers.append(str(raw[at:stop], "utf-8"))
            if len(layers) > MOST_REPEATED:
                raise Unexpected
        elif tag == 3 * 8 + _VARINT:
            output_dtype = _small(value)
        elif tag == 4 * 8 + _VARINT:
            priority = _small(value)
        elif tag == _X_OR_DATA_OR_CALL and tensor is None:
            tensor = _view_tensor(raw, at, stop)
        else:
            raise Unexpected
        at = stop
    if tensor is None:
        return CallFields(layer, tuple(layers), output_dtype, priority, 0, None, raw[:0])
    x_dtype, shape, data = tensor
    return CallFields(layer, tuple(layers), output_dtype, priority, x_dtype, shape, data)


def _view_tensor(raw: memoryview, at: int, end: int) -> tuple[int, tuple[int, ...], memoryview]:
    dtype, shape, data = 0, [], raw[:0]
    while at < end:
        tag, value, at, stop = _field(raw, at, end)
        if tag == 1 * 8 + _VARINT:
            dtype = _small(value)
        elif tag == 2 * 8 + _VARINT:
            shape.append(_signed(value))
        elif tag == 2 * 8 + _BYTES:
            while at < stop and len(shape) <= MOST_REPEATED:
                dim, at = read_varint(raw, at, stop)
                shape.append(_signed(dim))
        elif tag == _X_OR_DATA_OR_CALL:
            data = raw[at:stop]
        else:
            raise Unexpected
        at = stop
    if len(shape) > MOST_REPEATED:
        raise Unexpected
    return dtype, tuple(shape), data


def _view_stream_message(raw: memoryview, at: int, end: int) -> StreamFields:
    request_id = timeout_nanoseconds = 0
    traceparent, want_timing = "", False
    call: CallFields | None = None
    while at < end:
        tag, value, at, stop = _field(raw, at, end)
        if tag == 1 * 8 + _VARINT:
            request_id = value
        elif tag == 2 * 8 + _VARINT:
            timeout_nanoseconds = value
        elif tag == 3 * 8 + _BYTES:
            traceparent = str(raw[at:stop], "utf-8")
        elif tag == 4 * 8 + _VARINT:
            want_timing = bool(value)
        elif tag == _X_OR_DATA_OR_CALL and call is None:
            call = _view_call(raw, at, stop)
        else:
            raise Unexpected
        at = stop
    body = None if call is None else "call"
    return StreamFields(request_id, timeout_nanoseconds, traceparent, want_timing, body, call)


def _field(raw: memoryview, at: int, end: int) -> tuple[int, int, int, int]:
    """Return a field's tag, its value if that is a varint, where its bytes begin and end."""
    tag, at = read_varint(raw, at, end)
    value, at = read_varint(raw, at, end)
    if tag & 7 == _VARINT:
        return tag, value, at, at
    # Python would cut a slice that goes too far; here it is a message that ends too early.
    if tag & 7 != _BYTES or at + value > end:
        raise Unexpected
    return tag, 0, at, at + value


def read_varint(raw: bytes | memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the number that begins at `at`, and where it ends.

    Raises:
        Unexpected: none ends before `end`, or it has more than 64 bits.
    """
    value = shift = 0
    while at < end and shift < 64:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 1 << 64:
                raise Unexpected
            return value, at
        shift += 7
    raise Unexpected


def _small(value: int) -> int:
    """Return a number of 31 bits as it is; of others protobuf decides what they mean."""
    if value >= 1 << 31:
        raise Unexpected
    return value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
