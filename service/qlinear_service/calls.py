"""One MatMul call, whichever way it came: what unary calls and calls on a stream share.

Checks a request against what is loaded and turns outcomes into the response. Holds no queue, no
connection and no tensor.
"""

import time
from collections.abc import Sequence

from qlinear.v1 import linear_pb2
from qlinear_service.codec import CheckedRequest, Checker, encode_result
from qlinear_service.config import LimitsConfig
from qlinear_service.layers import LayerRegistry, LayerSpec
from qlinear_service.metrics import Metrics
from qlinear_service.results import Outcome
from qlinear_service.tracing import CallTrace, Tracer
from qlinear_service.transport import Transport
from qlinear_service.wire import CallFields, Parts

__all__ = ["Serving"]

NOTHING = Outcome(pieces=(), batch_rows=0, queue_nanoseconds=0, kernel_nanoseconds=0)


class Serving:
    """What exists once the models are loaded, and what calls do with it.

    Args:
        registry: the loaded layers.
        transport: carries calls to the engine.
        limits: what one call may hold.
        metrics: told of each reply.
        tracer: told of each call, if calls are traced.
    """

    def __init__(
        self,
        *,
        registry: LayerRegistry,
        transport: Transport,
        limits: LimitsConfig,
        metrics: Metrics,
        tracer: Tracer | None = None,
    ) -> None:
        self.registry = registry
        self.transport = transport
        self.limits = limits
        self.metrics = metrics
        self.tracer = tracer
        self._checker = Checker(resolve=self._resolve, limits=limits)

    def check(self, fields: CallFields) -> CheckedRequest:
        """Return the call that `fields` describe.

        Raises:
            RequestError: it breaks the contract, asks for an unknown layer or exceeds a limit.
        """
        return self._checker.check(fields)

    def outcomes_of_nothing(self, checked: CheckedRequest) -> list[Outcome]:
        """Return the outcomes of a call of zero rows, which nothing needs to compute."""
        return [NOTHING] * len(checked.plan.layers)

    def encode(
        self,
        checked: CheckedRequest,
        outcomes: Sequence[Outcome],
        *,
        timed_since: int | None,
        trace: CallTrace | None = None,
    ) -> Parts:
        """Return a call's results as parts of a MatMulResponse; results are views, not copies.

        Args:
            checked: the call.
            outcomes: one for each of its layers.
            timed_since: `time.perf_counter_ns()` at its arrival, if it wants timings.
            trace: told of its way, if it is traced.
        """
        started = time.perf_counter()
        parts: Parts = []
        if timed_since is not None:
            parts.append(_timings(checked, outcomes, timed_since))
        for place, outcome in zip(range(len(checked.plan.layers)), outcomes, strict=True):
            parts += encode_result(checked.plan, place, outcome.pieces)
        ended = time.perf_counter()
        self.metrics.replied(ended - started)
        if trace is not None:
            trace.answered(outcomes, started, ended)
        return parts

    def _resolve(self, name: str) -> LayerSpec:
        return self.registry.resolve(name).spec


def _timings(checked: CheckedRequest, outcomes: Sequence[Outcome], timed_since: int) -> bytes:
    """Return the timings of a call as the part of a MatMulResponse that stands before its y."""
    total = time.perf_counter_ns() - timed_since
    return linear_pb2.MatMulResponse(
        timings=[
            linear_pb2.Timing(
                layer=spec.name,
                batch_rows=outcome.batch_rows,
                queue_nanoseconds=outcome.queue_nanoseconds,
                kernel_nanoseconds=outcome.kernel_nanoseconds,
                total_nanoseconds=total,
            )
            for spec, outcome in zip(checked.plan.layers, outcomes, strict=True)
        ]
    ).SerializeToString()
