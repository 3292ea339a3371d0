"""The methods of qlinear.v1.QuantizedLinear: decode, carry, encode.

Holds no tensor and no queue. Errors leave as they are; `interceptors.py` gives them a status.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from qlinear.v1 import linear_pb2, linear_pb2_grpc
from qlinear_service import __version__
from qlinear_service.batcher import Outcome
from qlinear_service.codec import CheckedRequest, check, encode_tensor, wire_dtype
from qlinear_service.config import LimitsConfig
from qlinear_service.errors import Unavailable, UnknownLayer
from qlinear_service.kernels import layout
from qlinear_service.layers import LayerRegistry, LayerSpec, QuantizedLinear
from qlinear_service.transport import Transport

__all__ = ["LinearServicer", "Serving"]

WANT_TIMING = ("qlinear-want-timing", "1")

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What exists once the models are loaded."""

    registry: LayerRegistry
    transport: Transport


class LinearServicer(linear_pb2_grpc.QuantizedLinearServicer):
    """One object for all calls.

    Args:
        limits: what one call may hold.
        device: what computes, e.g. "cpu".
    """

    def __init__(self, *, limits: LimitsConfig, device: str) -> None:
        self._limits = limits
        self._device = device
        self._serving: Serving | None = None

    def attach(self, serving: Serving) -> None:
        """Hand over the loaded layers; before that every call is UNAVAILABLE."""
        self._serving = serving

    async def MatMul(
        self, request: linear_pb2.MatMulRequest, context: Context
    ) -> linear_pb2.MatMulResponse:
        """Answer one x with one y for each layer."""
        arrived = time.perf_counter_ns()
        serving = self._ready()

        def resolve(name: str) -> LayerSpec:
            return serving.registry.resolve(name).spec

        checked = check(request, resolve=resolve, limits=self._limits)
        if checked.rows == 0:
            nothing = Outcome(pieces=(), batch_rows=0, queue_nanoseconds=0, kernel_nanoseconds=0)
            outcomes = [nothing] * len(checked.layers)
        else:
            outcomes = await serving.transport.call(checked, deadline=_deadline(context))
        response = linear_pb2.MatMulResponse(
            y=[
                encode_tensor(checked, spec, outcome.pieces)
                for spec, outcome in zip(checked.layers, outcomes, strict=True)
            ]
        )
        if WANT_TIMING in (context.invocation_metadata() or ()):
            response.timings.extend(_timings(checked, outcomes, arrived))
        return response

    async def MatMulStream(
        self, request_iterator: AsyncIterator[linear_pb2.StreamRequest], context: Context
    ) -> AsyncIterator[linear_pb2.StreamResponse]:
        """Refuse: this server answers unary calls only."""
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED,
            "this version does not serve MatMulStream yet; use MatMul",
        )
        yield linear_pb2.StreamResponse()  # never reached; makes this the iterator gRPC expects

    async def ListLayers(
        self, request: linear_pb2.ListLayersRequest, context: Context
    ) -> linear_pb2.ListLayersResponse:
        """List all layers, or those of one model, by name."""
        registry = self._ready().registry
        if request.model and request.model not in registry.models:
            raise UnknownLayer(
                f"no model is called {request.model[:200]!r}; loaded: {', '.join(registry.models)}"
            )
        layers = sorted(registry, key=lambda layer: layer.spec.name)
        wanted = (x for x in layers if not request.model or x.spec.model == request.model)
        return linear_pb2.ListLayersResponse(layers=map(self._describe, wanted))

    async def GetServerInfo(
        self, request: linear_pb2.GetServerInfoRequest, context: Context
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
        )

    def _ready(self) -> Serving:
        if self._serving is None:
            raise Unavailable("the server has not loaded its models yet; send the call again later")
        return self._serving

    def _describe(self, layer: QuantizedLinear) -> linear_pb2.Layer:
        spec = layer.spec
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
            device=self._device,
            packed_bytes=layer.packed_bytes,
        )


def _deadline(context: Context) -> float | None:
    """Return the call's deadline on the event loop's clock, None if the client set none."""
    remaining = context.time_remaining()
    if remaining is None:
        return None
    return asyncio.get_running_loop().time() + remaining


def _timings(
    request: CheckedRequest, outcomes: Sequence[Outcome], arrived: int
) -> list[linear_pb2.Timing]:
    total = time.perf_counter_ns() - arrived
    return [
        linear_pb2.Timing(
            layer=spec.name,
            batch_rows=outcome.batch_rows,
            queue_nanoseconds=outcome.queue_nanoseconds,
            kernel_nanoseconds=outcome.kernel_nanoseconds,
            total_nanoseconds=total,
        )
        for spec, outcome in zip(request.layers, outcomes, strict=True)
    ]
