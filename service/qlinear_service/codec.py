"""Fields to checked values and values to bytes, pure: no clock, no queue, no tensor.

`Checker.check` is where a call's bytes are believed for the first time, so every rule of the
contract on one call stands here, in one fixed order, before anything is allocated. Texts name the
layer, what was given, what is expected and, where that is not plain, how to fix it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias, cast

from qlinear.v1 import linear_pb2
from qlinear_service.config import LimitsConfig
from qlinear_service.dtypes import DType
from qlinear_service.errors import InvalidRequest, TooLarge
from qlinear_service.layers import LayerSpec
from qlinear_service.wire import MOST_REPEATED, CallFields, tensor_head

__all__ = [
    "CallPlan",
    "CheckedRequest",
    "Checker",
    "encode_result",
    "requested_layers",
    "wire_dtype",
]

MAX_RANK = 64
"""numpy's own bound; beyond it a product of dimensions could become a number of any length."""

MAX_PRIORITY = 9

MOST_PLANS = 4096

PlanKey: TypeAlias = tuple[str, tuple[str, ...], int, int, int, tuple[int, ...] | None]
"""Fields of a call but its data."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallPlan:
    """What all calls of one kind have in common: x [..., k] flattened to [rows, k]."""

    layers: tuple[LayerSpec, ...]
    x_dtype: DType
    output_dtype: DType
    leading_shape: tuple[int, ...]
    """x's dimensions before the last; empty for x [k]."""
    rows: int
    priority: int
    x_bytes: int
    response_bytes: int
    """Bytes of all results together."""
    results: tuple[tuple[bytes, int], ...]
    """For each layer what stands before the bytes of its y on the wire, and how many these are."""
    over_limit: str | None
    """Why no such call is accepted, if its bytes are as many as they should be."""


class CheckedRequest(NamedTuple):
    """A call that keeps the contract."""

    plan: CallPlan
    x: memoryview
    """The bytes of the activations."""


class Checker:
    """Holds calls against the contract; remembers what it has found out about each kind.

    Args:
        resolve: layer name -> its spec; raises UnknownLayer or InvalidRequest. The same name gives
            the same spec for as long as this object lives.
        limits: what a call may hold.
    """

    def __init__(self, *, resolve: Callable[[str], LayerSpec], limits: LimitsConfig) -> None:
        self._resolve = resolve
        self._limits = limits
        # Only what succeeds is remembered, so nobody fills this with names that do not exist.
        self._plan = lru_cache(maxsize=MOST_PLANS)(self._make_plan)

    def check(self, fields: CallFields) -> CheckedRequest:
        """Return the call that `fields` describe.

        Raises:
            InvalidRequest: it breaks the contract.
            UnknownLayer: a layer does not exist.
            TooLarge: it keeps the contract and exceeds a limit.
        """
        plan = self._plan(fields[:-1])
        x = fields.data
        if x.nbytes != plan.x_bytes:
            shape = [*plan.leading_shape, plan.layers[0].k]
            raise InvalidRequest(
                f"layer {plan.layers[0].name!r}: x of shape {shape} and dtype {plan.x_dtype.text} "
                f"takes {plan.x_bytes} bytes; data has {x.nbytes}"
            )
        if plan.over_limit is not None:
            raise TooLarge(plan.over_limit)
        return CheckedRequest(plan, x)

    def _make_plan(self, key: PlanKey) -> CallPlan:
        layer, names, output_number, priority, x_number, given_shape = key
        asked = _layer_names(layer, names)
        # Before they are looked up, and not remembered: a message holds a million short names.
        if len(asked) > self._limits.max_request_layers:
            raise TooLarge(
                f"layers has {_count(asked)} names; at most {self._limits.max_request_layers} are "
                "accepted in one call (--max-request-layers): send fewer at a time"
            )
        layers = tuple(map(self._resolve, asked))
        name = layers[0].name
        if given_shape is None:
            raise InvalidRequest(f"layer {name!r}: x is missing; set x to the activations")
        x_dtype = _dtype(x_number, f"layer {name!r}: x.dtype")
        shape = _checked_shape(given_shape, name, x_dtype)
        _check_k(shape, layers)
        if priority > MAX_PRIORITY:
            raise InvalidRequest(
                f"layer {name!r}: priority is {priority}; expected 0 to {MAX_PRIORITY}"
            )
        output_dtype = x_dtype
        if output_number != linear_pb2.DTYPE_UNSPECIFIED:
            output_dtype = _dtype(output_number, f"layer {name!r}: output_dtype")
        rows = math.prod(shape[:-1])
        x_bytes = math.prod(shape) * x_dtype.itemsize
        results = []
        for spec in layers:
            y_bytes = rows * output_dtype.itemsize * spec.n
            results.append((tensor_head(output_dtype, (*shape[:-1], spec.n), y_bytes), y_bytes))
        response_bytes = sum(y_bytes for _, y_bytes in results)
        return CallPlan(
            layers=layers,
            x_dtype=x_dtype,
            output_dtype=output_dtype,
            leading_shape=shape[:-1],
            rows=rows,
            priority=priority,
            x_bytes=x_bytes,
            response_bytes=response_bytes,
            results=tuple(results),
            over_limit=_over_limit(layers, rows, x_bytes, response_bytes, self._limits),
        )


def _count(names: Sequence[str]) -> str:
    # Of more the wire reader does not tell how many there are.
    return f"{len(names)} or more" if len(names) >= MOST_REPEATED else str(len(names))


def requested_layers(request: object) -> Sequence[str]:
    """Return the names of the layers that a call asks for, unchecked; none of other messages."""
    if not isinstance(request, CallFields):
        return ()
    return (request.layer,) if request.layer else request.layers


def encode_result(
    plan: CallPlan, place: int, pieces: Sequence[memoryview]
) -> list[bytes | memoryview]:
    """Return the y of one layer as parts of a MatMulResponse.

    Args:
        plan: the call, for the shape of its answer.
        place: which of its layers.
        pieces: bytes of y's rows, in order; views, which are not copied here.
    """
    nbytes = 0
    for piece in pieces:
        nbytes += piece.nbytes
    head, expected = plan.results[place]
    if nbytes != expected:
        name = plan.layers[place].name
        raise RuntimeError(f"layer {name!r}: {nbytes} result bytes; expected {expected}")
    return [head, *pieces]


def wire_dtype(dtype: DType) -> linear_pb2.DType:
    """Return the message's value for `dtype`: the same number under its other type."""
    return cast(linear_pb2.DType, dtype.value)


def _layer_names(layer: str, layers: tuple[str, ...]) -> Sequence[str]:
    if layer and layers:
        raise InvalidRequest(
            f"layer is {layer[:200]!r} and layers has {len(layers)} names; set one of the two"
        )
    if not layer and not layers:
        raise InvalidRequest("neither layer nor layers is set; set one of the two")
    return (layer,) if layer else layers


def _dtype(number: int, what: str) -> DType:
    try:
        return DType(number)
    except ValueError:
        names = ", ".join(f"{dtype.value} ({dtype.text})" for dtype in DType)
        raise InvalidRequest(f"{what} is {number}; expected one of {names}") from None


def _checked_shape(shape: tuple[int, ...], name: str, dtype: DType) -> tuple[int, ...]:
    if not 1 <= len(shape) <= MAX_RANK:
        raise InvalidRequest(
            f"layer {name!r}: x has {len(shape)} dimensions; expected 1 to {MAX_RANK}, the last of "
            "them k"
        )
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


def _over_limit(
    layers: Sequence[LayerSpec], rows: int, x_bytes: int, response_bytes: int, limits: LimitsConfig
) -> str | None:
    """Return why a call of this size is not accepted, None if it is."""
    name = layers[0].name
    if rows > limits.max_request_rows:
        return (
            f"layer {name!r}: x has {rows} rows; at most {limits.max_request_rows} are accepted in "
            "one call (--max-request-rows): send fewer at a time"
        )
    # Rows wait once for each layer; a call that fills the whole queue could never enter.
    waiting_rows = rows * len(layers)
    if waiting_rows > limits.max_queue_rows:
        return (
            f"{rows} rows for {len(layers)} layers are {waiting_rows} rows to compute; at most "
            f"{limits.max_queue_rows} fit (--max-queue-rows): send fewer at a time"
        )
    if x_bytes > limits.max_request_bytes:
        return (
            f"layer {name!r}: x has {x_bytes} bytes; at most {limits.max_request_bytes} are "
            "accepted in one call (--max-request-bytes): send fewer rows at a time"
        )
    if response_bytes > limits.max_response_bytes:
        return (
            f"layer {name!r}: the answer would have {response_bytes} bytes; at most "
            f"{limits.max_response_bytes} are sent in one (--max-response-bytes): send fewer rows "
            "or layers at a time"
        )
    return None
