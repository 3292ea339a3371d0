"""What the sync and the async client share: no channel, no clock of its own, no waiting.

Builds and checks requests, reads replies, turns RpcErrors into typed errors, shrinks deadlines.
`_client.py` and `_async_client.py` add only the channel and the sending.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import grpc

from qlinear.v1 import linear_pb2 as pb
from qlinear_client._arrays import ELEMENTS, Activations, Element, element_of, read_activations
from qlinear_client._config import (
    DEFAULT_MAX_RETRIES,
    DEFAULT_RECEIVE_BYTES,
    DEFAULT_TRANSPORT,
    TRANSPORTS,
    Default,
    receive_bytes_for,
)
from qlinear_client._errors import (
    CallError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    error_class,
)
from qlinear_client._info import LayerInfo, ServerInfo
from qlinear_client._retries import SendAlone
from qlinear_client._targets import checked_target, plain_words

__all__ = [
    "Deadline",
    "MatMulCall",
    "Session",
    "Timeout",
    "call_error",
    "layers_from",
    "prepare_matmul",
]

Timeout: TypeAlias = float | Default | None
"""Seconds; None = no deadline; the default = what the client was made with."""

MAX_PRIORITY = 9
PUSHBACK_KEY = "grpc-retry-pushback-ms"


class Deadline:
    """The end of one call, shared by everything that is sent for it.

    Args:
        timeout_seconds: from now; None = never.
        clock: seconds from any fixed point.
    """

    def __init__(
        self, timeout_seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._end = math.inf if timeout_seconds is None else clock() + timeout_seconds

    def remaining_seconds(self) -> float | None:
        """Return what is left for the next attempt; None = no deadline.

        Raises:
            DeadlineExceeded: nothing is left.
        """
        if self._timeout_seconds is None:
            return None
        left = self._end - self._clock()
        if left <= 0:
            raise DeadlineExceeded(
                f"the deadline of {self._timeout_seconds:g} s passed before the call was sent"
            )
        return left

    def missed(self) -> DeadlineExceeded:
        """Return what to raise when the end came before the answer."""
        return DeadlineExceeded(f"no answer came within {self._timeout_seconds:g} s")


class Session:
    """What a client remembers between calls: where to and how, and the server's limits."""

    def __init__(
        self,
        target: str,
        timeout_seconds: float | None,
        *,
        transport: str = DEFAULT_TRANSPORT,
        max_retries: int = DEFAULT_MAX_RETRIES,
    ) -> None:
        self.target = checked_target(target)
        self.timeout_seconds = _checked_timeout(timeout_seconds)
        if transport not in TRANSPORTS:
            raise InvalidArgument(f"transport is {transport!r}; expected {' or '.join(TRANSPORTS)}")
        if max_retries < 0:
            raise InvalidArgument(f"max_retries is {max_retries}; expected 0 or more")
        self.uses_streams = transport == "stream"
        """Becomes False when the server turns out to have no MatMulStream."""
        self.max_retries = max_retries
        self.info: ServerInfo | None = None
        """The latest answer of GetServerInfo."""
        self.receive_bytes = DEFAULT_RECEIVE_BYTES
        """Only grows: an open channel must fit every answer still on its way."""

    def deadline(self, timeout: Timeout) -> Deadline:
        """Return the end of a call that starts now."""
        if isinstance(timeout, Default):
            return Deadline(self.timeout_seconds)
        return Deadline(_checked_timeout(timeout))

    def leave_streams(self, reason: SendAlone) -> None:
        """Learn why a stream ended: if the server has none, none is opened again."""
        if reason.code is grpc.StatusCode.UNIMPLEMENTED:
            self.uses_streams = False

    def learn(self, reply: pb.GetServerInfoResponse) -> ServerInfo:
        """Keep what a server says about its limits."""
        values = {field.name: getattr(reply, field.name) for field in fields(ServerInfo)}
        self.info = ServerInfo(**{**values, "models": tuple(reply.models)})
        self.receive_bytes = max(self.receive_bytes, receive_bytes_for(reply.max_response_bytes))
        return self.info


@dataclass(frozen=True, slots=True)
class MatMulCall:
    """One checked call: what is sent and how its reply is read."""

    message: pb.StreamRequest
    """The request as a stream carries it; its own fields are the stream's to set."""
    layers: tuple[str, ...]
    is_single: bool
    """True: the caller named one layer and gets one array instead of a list."""
    x: Activations
    output: Element

    @property
    def request(self) -> pb.MatMulRequest:
        """The request as a unary call carries it."""
        return self.message.call

    def refusal(self, info: ServerInfo) -> ResourceExhausted | None:
        """Return the error that this server's limits would answer with, or None if it fits."""
        size = len(self.x.raw)
        if 0 < info.max_request_bytes < size:
            return ResourceExhausted(
                f"x has {size} bytes; the server takes at most {info.max_request_bytes} "
                "(max_request_bytes): send fewer rows per call"
            )
        if 0 < info.max_request_rows < self.x.rows:
            return ResourceExhausted(
                f"x has {self.x.rows} rows; the server takes at most {info.max_request_rows} "
                "(max_request_rows): send fewer rows per call"
            )
        return None

    def results_from(self, reply: pb.MatMulResponse) -> Any:
        """Return the result, or the list of results, in the array library of x.

        Raises:
            Internal: the reply does not fit what was asked; nothing of it is used.
        """
        if len(reply.y) != len(self.layers):
            raise Internal(
                f"the server answered with {len(reply.y)} results to {len(self.layers)} layers"
            )
        results = [self._result(layer, y) for layer, y in zip(self.layers, reply.y, strict=True)]
        return results[0] if self.is_single else results

    def _result(self, layer: str, y: pb.Tensor) -> Any:
        shape = tuple(y.shape)
        raw = y.data  # each access copies the bytes out of the message
        expected = f"dtype {self.output.name}, leading dimensions {list(self.x.shape[:-1])}"
        fits = (
            y.dtype == self.output.number
            and len(shape) == len(self.x.shape)
            and shape[:-1] == self.x.shape[:-1]
            and shape[-1] >= 0
            and len(raw) == math.prod(shape) * self.output.itemsize
        )
        if not fits:
            raise Internal(
                f"the server's answer for layer {layer!r} has dtype number {y.dtype}, shape "
                f"{list(shape)} and {len(raw)} bytes; expected {expected} and as many bytes as "
                "the shape says"
            )
        return self.x.restore(raw, shape, self.output)


def prepare_matmul(
    layer: str | Sequence[str], x: object, *, output_dtype: object, priority: int
) -> MatMulCall:
    """Check the arguments of a matmul and build its request.

    Raises:
        InvalidArgument: a layer list that is empty or not names, an x that cannot travel, an
            output dtype or priority that the contract does not have.
    """
    is_single = isinstance(layer, str)
    layers = (layer,) if isinstance(layer, str) else _checked_layers(layer)
    if not all(layers):
        raise InvalidArgument('a layer name is empty; expected "<model>/<module>"')
    if not 0 <= priority <= MAX_PRIORITY:
        raise InvalidArgument(f"priority is {priority}; expected 0 (normal) to {MAX_PRIORITY}")
    activations = read_activations(x)
    output = activations.element if output_dtype is None else element_of(output_dtype)
    if output.name == "bfloat16" and not activations.restores_bfloat16:
        raise InvalidArgument(
            "bfloat16 results as numpy arrays need ml_dtypes (pip install 'qlinear[bf16]'); "
            "or send x as a torch tensor"
        )
    # Built in place: to make the parts first would copy the activations twice more.
    message = pb.StreamRequest()
    request = message.call
    if is_single:
        request.layer = layers[0]
    else:
        request.layers.extend(layers)
    if output_dtype is not None:
        request.output_dtype = output.number
    request.priority = priority
    request.x.dtype = activations.element.number
    request.x.shape.extend(activations.shape)
    request.x.data = activations.raw
    return MatMulCall(message, layers, is_single, activations, output)


def layers_from(reply: pb.ListLayersResponse) -> list[LayerInfo]:
    """Return the layers of a reply, in its order."""
    names = {element.number: element.name for element in ELEMENTS.values()}
    return [
        LayerInfo(
            **{
                **{field.name: getattr(layer, field.name) for field in fields(LayerInfo)},
                "scale_dtype": names.get(layer.scale_dtype, "unspecified"),
            }
        )
        for layer in reply.layers
    ]


_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def call_error(error: grpc.RpcError) -> CallError:
    """Turn what gRPC raised into the typed error of its status."""
    # Both kinds of RpcError that calls raise, grpc's and grpc.aio's, have these three.
    code: grpc.StatusCode = error.code()
    message = (
        plain_words(error.details() or "") or f"the call ended with {code.name} and no explanation"
    )
    pushback = _pushback_seconds(error.trailing_metadata() or ())
    # The server's word counts; without one, only a server that cannot be reached, drains or stops
    # may recover. A gRPC server that stops cancels the calls that reach it in that moment.
    retryable = code in _GONE if pushback is None else pushback >= 0
    return error_class(code)(
        message,
        code=code,
        retryable=retryable,
        retry_after_seconds=pushback if retryable else None,
    )


def _pushback_seconds(metadata: Iterable[Any]) -> float | None:
    """Read how long the server asks to wait; None: it does not say, below 0: do not retry."""
    for key, value in metadata:
        if key == PUSHBACK_KEY:
            try:
                return int(value) / 1000
            except ValueError:  # gRPC's retry design (A6): unreadable means "do not retry"
                return -1.0
    return None


def _checked_layers(layers: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(layers, Sequence) or not all(isinstance(name, str) for name in layers):
        raise InvalidArgument(f"layer is {layers!r}; expected a layer name or a list of them")
    if not layers:
        raise InvalidArgument("the list of layers is empty; expected at least one name")
    return tuple(layers)


def _checked_timeout(timeout_seconds: float | None) -> float | None:
    if timeout_seconds is not None and not 0 < timeout_seconds < math.inf:
        raise InvalidArgument(
            f"timeout is {timeout_seconds}; expected seconds above 0, or None for no deadline"
        )
    return timeout_seconds
