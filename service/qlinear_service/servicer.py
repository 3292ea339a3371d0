"""The methods of qlinear.v1.QuantizedLinear: decode, carry, encode.

Holds no tensor and no queue. Errors leave as they are; `handlers.py` gives them a status.
"""

import asyncio
import time
from typing import Any, TypeAlias

import grpc

from qlinear.v1 import linear_pb2
from qlinear_service import __version__
from qlinear_service.callers import Caller
from qlinear_service.calls import Serving
from qlinear_service.codec import wire_dtype
from qlinear_service.config import LimitsConfig
from qlinear_service.errors import Unavailable, UnknownLayer
from qlinear_service.kernels import layout
from qlinear_service.layers import QuantizedLinear
from qlinear_service.lifecycle import Lifecycle
from qlinear_service.metrics import Metrics
from qlinear_service.streaming import CallStream
from qlinear_service.unread import COUNTED_BYTES, UnreadAnswers
from qlinear_service.wire import CallFields

__all__ = ["LinearServicer"]

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class LinearServicer:
    """One object for all calls; `handlers.py` says what its methods take and return on the wire.

    Args:
        limits: what one call may hold.
        device: what computes, e.g. "cpu".
        batch_invariant: whether a row's result does not depend on its company.
        lifecycle: tells streams when to end.
        max_stream_age_seconds: when streams end in any case.
    """

    def __init__(
        self,
        *,
        limits: LimitsConfig,
        device: str,
        batch_invariant: bool,
        lifecycle: Lifecycle,
        max_stream_age_seconds: float,
    ) -> None:
        self._limits = limits
        self._lifecycle = lifecycle
        self._max_stream_age_seconds = max_stream_age_seconds
        self._device = device
        self._batch_invariant = batch_invariant
        self._unread = UnreadAnswers(limits.max_stream_bytes)
        self._serving: Serving | None = None

    def attach(self, serving: Serving) -> None:
        """Hand over the loaded layers; before that every call is UNAVAILABLE."""
        self._serving = serving

    async def MatMul(self, request: CallFields, context: Context, caller: Caller) -> bytes:
        """Answer one x with one y for each layer; returns a MatMulResponse."""
        arrived = time.perf_counter_ns()
        serving = self._ready()
        checked = serving.check(request)
        trace = caller.trace
        response_bytes = checked.plan.response_bytes
        connection = str(context.peer()) if response_bytes >= COUNTED_BYTES else None
        if connection is not None:
            self._unread.check(connection, response_bytes)
        if checked.plan.rows == 0:
            outcomes = serving.outcomes_of_nothing(checked)
        else:
            outcomes = await serving.transport.call(
                checked,
                deadline=_deadline(context),
                traceparent=None if trace is None else trace.traceparent,
                client=caller.client,
            )
        if connection is not None:
            self._unread.hold(connection, response_bytes)
        since = arrived if caller.wants_timing else None
        parts = serving.encode(checked, outcomes, timed_since=since, trace=trace)
        return b"".join(parts)

    # Reading and writing through the context is cheaper than two generators, and reading can go on
    # while an answer is written.
    async def MatMulStream(self, _: object, context: Context) -> None:
        """Answer many calls on one stream, as they finish."""
        stream = CallStream(
            context,
            serving=self._ready(),
            lifecycle=self._lifecycle,
            max_age_seconds=self._max_stream_age_seconds,
        )
        await stream.run()

    async def ListLayers(
        self, request: linear_pb2.ListLayersRequest, context: Context, caller: Caller
    ) -> linear_pb2.ListLayersResponse:
        """List all layers, or those of one model, by name."""
        registry = self._ready().registry
        if request.model and request.model not in registry.models:
            raise UnknownLayer(
                f"no model is called {request.model[:200]!r}; loaded: {', '.join(registry.models)}"
            )
        layers = sorted(registry, key=lambda layer: layer.spec.name)
        wanted = (x for x in layers if not request.model or x.spec.model == request.model)
        metrics = self._ready().metrics
        return linear_pb2.ListLayersResponse(layers=[_describe(layer, metrics) for layer in wanted])

    async def GetServerInfo(
        self, request: linear_pb2.GetServerInfoRequest, context: Context, caller: Caller
    ) -> linear_pb2.GetServerInfoResponse:
        """Tell versions, limits and models."""
        registry = self._ready().registry
        return linear_pb2.GetServerInfoResponse(
            version=__version__,
            layout_version=layout.VERSION,
            device=self._device,
            max_message_bytes=self._limits.max_message_bytes,
            max_request_bytes=self._limits.max_request_bytes,
            max_request_rows=self._limits.max_request_rows,
            max_response_bytes=self._limits.max_response_bytes,
            models=registry.models,
            batch_invariant=self._batch_invariant,
        )

    def _ready(self) -> Serving:
        if self._serving is None:
            raise Unavailable("the server has not loaded its models yet; send the call again later")
        return self._serving


def _describe(layer: QuantizedLinear, metrics: Metrics) -> linear_pb2.Layer:
    spec = layer.spec
    curve = metrics.curves.get(spec.shape)
    return linear_pb2.Layer(
        name=spec.name,
        model=spec.model,
        n=spec.n,
        k=spec.k,
        bits=spec.bits,
        group_size=spec.group_size,
        symmetric=spec.symmetric,
        has_bias=spec.has_bias,
        scale_dtype=wire_dtype(spec.scale_dtype),
        device=metrics.devices_of(spec.name),
        packed_bytes=layer.packed_bytes,
        sweet_spot_rows=0 if curve is None else curve.sweet_spot_rows,
    )


def _deadline(context: Context) -> float | None:
    """Return the call's deadline on the event loop's clock, None if the client set none."""
    remaining = context.time_remaining()
    if remaining is None:
        return None
    return asyncio.get_running_loop().time() + remaining
