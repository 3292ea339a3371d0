"""Messages to checked values and back, pure: no clock, no queue, no tensor.

`check` is where a call's bytes are believed for the first time, so every rule of the contract on
one call stands here, in one fixed order, before anything is allocated. Texts name the layer, what
was given, what is expected and, where that is not plain, how to fix it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from qlinear.v1 import linear_pb2
from qlinear_service.config import LimitsConfig
from qlinear_service.dtypes import DType
from qlinear_service.errors import InvalidRequest, TooLarge
from qlinear_service.layers import LayerSpec

__all__ = ["CheckedRequest", "check", "encode_tensor", "wire_dtype"]

MAX_RANK = 64
"""numpy's own bound; beyond it a product of dimensions could become a number of any length."""

MAX_PRIORITY = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A call that keeps the contract: x [..., k] flattened to [rows, k]."""

    layers: tuple[LayerSpec, ...]
    x_dtype: DType
    output_dtype: DType
    leading_shape: tuple[int, ...]
    """x's dimensions before the last; empty for x [k]."""
    rows: int
    priority: int
    x: memoryview
    """The bytes of the activations, rows * k elements."""

    @property
    def response_bytes(self) -> int:
        """Bytes of all results together."""
        return self.rows * self.output_dtype.itemsize * sum(spec.n for spec in self.layers)


def check(
    request: linear_pb2.MatMulRequest,
    *,
    resolve: Callable[[str], LayerSpec],
    limits: LimitsConfig,
) -> CheckedRequest:
    """Return the call that `request` describes.

    Args:
        request: any message at all.
        resolve: layer name -> its spec; raises UnknownLayer or InvalidRequest.
        limits: what a call may hold.

    Raises:
        InvalidRequest: it breaks the contract.
        UnknownLayer: a layer does not exist.
        TooLarge: it keeps the contract and exceeds a limit.
    """
    layers = tuple(resolve(name) for name in _layer_names(request))
    name = layers[0].name
    if not request.HasField("x"):
        raise InvalidRequest(f"layer {name!r}: x is missing; set x to the activations")
    x_dtype = _dtype(request.x.dtype, f"layer {name!r}: x.dtype")
    shape = _shape(request.x.shape, name, x_dtype)
    _check_k(shape, layers)
    # Each access to a bytes field copies it: once only.
    x = memoryview(request.x.data)
    _check_byte_count(x, shape, x_dtype, name)
    if request.priority > MAX_PRIORITY:
        raise InvalidRequest(
            f"layer {name!r}: priority is {request.priority}; expected 0 to {MAX_PRIORITY}"
        )
    output_dtype = x_dtype
    if request.output_dtype != linear_pb2.DTYPE_UNSPECIFIED:
        output_dtype = _dtype(request.output_dtype, f"layer {name!r}: output_dtype")
    checked = CheckedRequest(
        layers=layers,
        x_dtype=x_dtype,
        output_dtype=output_dtype,
        leading_shape=shape[:-1],
        rows=math.prod(shape[:-1]),
        priority=request.priority,
        x=x,
    )
    _check_limits(checked, limits)
    return checked


def encode_tensor(
    request: CheckedRequest, spec: LayerSpec, pieces: Sequence[memoryview]
) -> linear_pb2.Tensor:
    """Return the result of one layer as a message.

    Args:
        request: the call, for the shape of its answer.
        spec: the layer.
        pieces: bytes of y's rows, in order; they are copied.
    """
    data = b"".join(pieces)
    expected = request.rows * spec.n * request.output_dtype.itemsize
    if len(data) != expected:
        raise RuntimeError(f"layer {spec.name!r}: {len(data)} result bytes; expected {expected}")
    return linear_pb2.Tensor(
        dtype=wire_dtype(request.output_dtype),
        shape=(*request.leading_shape, spec.n),
        data=data,
    )


def wire_dtype(dtype: DType) -> linear_pb2.DType:
    """Return the message's value for `dtype`: the same number under its other type."""
    return cast(linear_pb2.DType, dtype.value)


def _layer_names(request: linear_pb2.MatMulRequest) -> Sequence[str]:
    if request.layer and request.layers:
        raise InvalidRequest(
            f"layer is {request.layer[:200]!r} and layers has {len(request.layers)} names; set one "
            "of the two"
        )
    if not request.layer and not request.layers:
        raise InvalidRequest("neither layer nor layers is set; set one of the two")
    return [request.layer] if request.layer else request.layers


def _dtype(number: int, what: str) -> DType:
    try:
        return DType(number)
    except ValueError:
        names = ", ".join(f"{dtype.value} ({dtype.text})" for dtype in DType)
        raise InvalidRequest(f"{what} is {number}; expected one of {names}") from None


def _shape(given: Sequence[int], name: str, dtype: DType) -> tuple[int, ...]:
    if not 1 <= len(given) <= MAX_RANK:
        raise InvalidRequest(
            f"layer {name!r}: x has {len(given)} dimensions; expected 1 to {MAX_RANK}, the last of "
            "them k"
        )
    shape = tuple(given)
    if min(shape) < 0:
        raise InvalidRequest(
            f"layer {name!r}: x has shape {list(shape)}; expected no negative dimension"
        )
    # The wire's sizes are 64-bit; a product beyond that is no tensor, whatever the zeros in it.
    if math.prod(dim or 1 for dim in shape) * dtype.itemsize >= 1 << 63:
        raise InvalidRequest(
            f"layer {name!r}: x has shape {list(shape)}, which no memory can hold; expected fewer "
            "than 2**63 bytes"
        )
    return shape


def _check_k(shape: tuple[int, ...], layers: Sequence[LayerSpec]) -> None:
    first = layers[0]
    for spec in layers:
        if spec.k != first.k:
            raise InvalidRequest(
                f"layers {first.name!r} and {spec.name!r} have k = {first.k} and {spec.k}; layers "
                "of one call share one x and must have the same k"
            )
    if shape[-1] != first.k:
        raise InvalidRequest(
            f"layer {first.name!r}: x has shape {list(shape)}; expected [..., {first.k}], as "
            f"k = {first.k}"
        )


def _check_byte_count(x: memoryview, shape: tuple[int, ...], dtype: DType, name: str) -> None:
    expected = math.prod(shape) * dtype.itemsize
    if x.nbytes != expected:
        raise InvalidRequest(
            f"layer {name!r}: x of shape {list(shape)} and dtype {dtype.text} takes {expected} "
            f"bytes; data has {x.nbytes}"
        )


def _check_limits(request: CheckedRequest, limits: LimitsConfig) -> None:
    name = request.layers[0].name
    if request.rows > limits.max_request_rows:
        raise TooLarge(
            f"layer {name!r}: x has {request.rows} rows; at most {limits.max_request_rows} are "
            "accepted in one call (--max-request-rows): send fewer at a time"
        )
    # Rows wait once for each layer; a call that fills the whole queue could never enter.
    waiting_rows = request.rows * len(request.layers)
    if waiting_rows > limits.max_queue_rows:
        raise TooLarge(
            f"{request.rows} rows for {len(request.layers)} layers are {waiting_rows} rows to "
            f"compute; at most {limits.max_queue_rows} fit (--max-queue-rows): send fewer at a time"
        )
    if request.x.nbytes > limits.max_request_bytes:
        raise TooLarge(
            f"layer {name!r}: x has {request.x.nbytes} bytes; at most {limits.max_request_bytes} "
            "are accepted in one call (--max-request-bytes): send fewer rows at a time"
        )
    if request.response_bytes > limits.max_response_bytes:
        raise TooLarge(
            f"layer {name!r}: the answer would have {request.response_bytes} bytes; at most "
            f"{limits.max_response_bytes} are sent in one (--max-response-bytes): send fewer rows "
            "or layers at a time"
        )
