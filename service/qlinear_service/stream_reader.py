"""Reads the messages of one stream, and remembers how those of each kind begin.

The calls of a stream differ in their ids, their timeouts and the bytes of x; the rest of a message
is the same bytes again and again. A message that begins as an earlier one did and is as long says
the same, so only its numbers are read; any other is left to `wire.py`. Knows no rule of the
contract.
"""

from typing import TypeAlias

from qlinear.v1 import linear_pb2
from qlinear_service.dtypes import DType
from qlinear_service.wire import (
    CallFields,
    StreamFields,
    Unexpected,
    length_prefix,
    read_stream_message,
    read_varint,
    tensor_head,
)

__all__ = ["MOST_KINDS", "StreamReader"]

MOST_KINDS = 1024
MOST_HEAD_BYTES = 1024

_ID, _TIMEOUT, _WANT_TIMING = 1 * 8, 2 * 8, bytes((4 * 8, 1))

_DTYPES = frozenset(DType)

Kind: TypeAlias = tuple[bool, tuple[object, ...], int]
"""Whether timings are wanted, all fields of the call but its data, and the bytes of that."""


class StreamReader:
    """One for each stream, so that no client makes another's be forgotten."""

    def __init__(self) -> None:
        # What follows the numbers up to the bytes of x; x takes the rest of the message.
        self._kinds: dict[bytes, Kind] = {}
        self._head_bytes: dict[int, int] = {}  # by all that follows the numbers

    def read(self, raw: bytes) -> StreamFields:
        """Return the fields of a StreamRequest.

        Raises:
            DecodeError: `raw` is none.
        """
        request_id = timeout = at = 0
        try:
            if raw[0] == _ID:
                request_id, at = read_varint(raw, 1, len(raw))
            if raw[at] == _TIMEOUT:
                timeout, at = read_varint(raw, at + 1, len(raw))
        except (IndexError, Unexpected):
            return read_stream_message(raw)
        end = at + self._head_bytes.get(len(raw) - at, 0)
        kind = self._kinds.get(raw[at:end])
        if kind is None or kind[2] != len(raw) - end:  # as long as another kind, by what follows x
            message = read_stream_message(raw)
            self._remember(message)
            return message
        wants_timing, fields, _ = kind
        call = CallFields._make((*fields, memoryview(raw)[end:]))
        return StreamFields(request_id, timeout, "", wants_timing, "call", call)

    def _remember(self, message: StreamFields) -> None:
        """Remember how protobuf would begin such a message; most clients are protobuf."""
        if message.call is None or message.traceparent:
            return  # a traceparent is another one each time
        head = _head_of(message.call, message.want_timing)
        if head is None:
            return
        x_bytes = message.call.data.nbytes
        if len(self._kinds) >= MOST_KINDS:
            self._kinds.clear()
            self._head_bytes.clear()
        self._kinds[head] = message.want_timing, message.call[:-1], x_bytes
        self._head_bytes[len(head) + x_bytes] = len(head)


def _head_of(call: CallFields, wants_timing: bool) -> bytes | None:
    """Return what stands between the numbers and the bytes of x; None for what is no sane call."""
    if call.shape is None or len(call.shape) + len(call.layers) > MOST_HEAD_BYTES:
        return None
    if call.x_dtype not in _DTYPES or min(call.shape, default=0) < 0:
        return None
    before_x = linear_pb2.MatMulRequest(
        layer=call.layer,
        layers=call.layers,
        output_dtype=call.output_dtype,  # type: ignore[arg-type]
        priority=call.priority,
    ).SerializeToString()
    x_bytes = call.data.nbytes
    before_data = before_x + tensor_head(call.x_dtype, call.shape, x_bytes)
    if len(before_data) > MOST_HEAD_BYTES:
        return None
    timing = _WANT_TIMING if wants_timing else b""
    return timing + length_prefix(len(before_data) + x_bytes) + before_data
