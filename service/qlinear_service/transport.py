"""How a checked call reaches the engine and its results come back.

`Transport` is all that the servicer knows. `LocalTransport` serves front ends that live in the
engine's own process; one that talks to another process through the same slots and descriptors
takes its place without a change elsewhere. Holds no message and no tensor.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol, TypeAlias

from qlinear_service.batching import BatchKey, WorkItem
from qlinear_service.codec import CheckedRequest
from qlinear_service.dtypes import DType
from qlinear_service.metrics import Metrics
from qlinear_service.pending import Settle
from qlinear_service.results import Answer, Outcome
from qlinear_service.slots import Slab

__all__ = ["Carried", "Driver", "LocalTransport", "Transport"]


Carried: TypeAlias = Sequence[WorkItem]
"""One call on its way: the work for each of its layers."""


class Transport(Protocol):
    """Carries calls to the engine and back."""

    async def call(
        self,
        request: CheckedRequest,
        *,
        deadline: float | None,
        traceparent: str | None = None,
        client: str = "",
    ) -> list[Outcome]:
        """Return one outcome for each layer asked for, in order.

        Args:
            request: checked, of 1 or more rows; its bytes are copied before the first await.
            deadline: on the event loop's clock; the call is not computed after it.
            traceparent: of the call's span, if it is traced.
            client: whose call it is, for sharing evenly.

        Raises:
            RequestError: the call, all of it, has failed.
        """
        ...

    def submit(
        self,
        request: CheckedRequest,
        *,
        deadline: float | None,
        settle: Settle,
        traceparent: str | None = None,
        client: str = "",
    ) -> Carried:
        """Send a call on its way; `settle` is told once what `call` returns or raises.

        Raises:
            Overloaded: there is no room; `settle` is told nothing.
        """
        ...

    def withdraw(self, carried: Carried) -> bool:
        """End a call that has not begun to run as `Cancelled`; return False if it has begun."""
        ...

    def drop(self, carried: Carried) -> None:
        """Forget a call whose caller has left: it is told nothing, and what waits never runs."""
        ...


class Driver(Protocol):
    """What takes calls to the engine: `batcher.Batcher` or `dispatch.batcher.DispatchBatcher`."""

    def check_room(self, rows: int) -> None:
        """Raise Overloaded unless `rows` more may wait."""

    def submit(self, items: Sequence[WorkItem], settle: Settle) -> None:
        """Queue the items of one call; raises Overloaded if there is no room."""

    def withdraw(self, items: Sequence[WorkItem]) -> bool:
        """End a call of which nothing has begun to run as `Cancelled`."""
        ...

    def cancel(self, items: Sequence[WorkItem]) -> None:
        """Forget a call."""


class LocalTransport:
    """Slab, queue and front end in one process.

    Args:
        slab: where activations are copied to.
        batcher: takes the descriptors.
        clock: the event loop's.
        metrics: told of each copy.
    """

    def __init__(
        self, *, slab: Slab, batcher: Driver, clock: Callable[[], float], metrics: Metrics
    ) -> None:
        self._metrics = metrics
        self._slab = slab
        self._batcher = batcher
        self._clock = clock
        self._sequence = itertools.count(1)

    async def call(
        self,
        request: CheckedRequest,
        *,
        deadline: float | None,
        traceparent: str | None = None,
        client: str = "",
    ) -> list[Outcome]:
        """See `Transport.call`. Cancelling it drops what of the call has not begun to run."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answers: list[Answer] = []

        def settle(answer: Answer) -> None:
            if not settled.done():  # else cancelled a moment ago
                answers.append(answer)
                settled.set_result(None)

        carried = self.submit(
            request, deadline=deadline, settle=settle, traceparent=traceparent, client=client
        )
        try:
            await settled
        except asyncio.CancelledError:
            self.drop(carried)
            raise
        answer = answers.pop()
        if isinstance(answer, list):
            return answer
        try:
            raise answer
        finally:
            # Not left to the garbage collector: an error names this frame, which must not name it.
            del answer

    def submit(
        self,
        request: CheckedRequest,
        *,
        deadline: float | None,
        settle: Settle,
        traceparent: str | None = None,
        client: str = "",
    ) -> Carried:
        """See `Transport.submit`."""
        items = self._enter(request, deadline, traceparent, client)
        self._batcher.submit(items, settle)
        return items

    def withdraw(self, carried: Carried) -> bool:
        """See `Transport.withdraw`."""
        return self._batcher.withdraw(carried)

    def drop(self, carried: Carried) -> None:
        """See `Transport.drop`."""
        self._batcher.cancel(carried)

    def _enter(
        self,
        request: CheckedRequest,
        deadline: float | None,
        traceparent: str | None,
        client: str,
    ) -> list[WorkItem]:
        """Copy the activations into a slot and describe them, once for each layer."""
        # Before the copy: a full queue must not cost one. Nothing can come between the two.
        plan = request.plan
        self._batcher.check_room(plan.rows * len(plan.layers))
        # One slot for the call, paid for by the larger of what comes in and what goes out.
        started = time.perf_counter()
        slot_bytes = max(plan.x_bytes, plan.response_bytes)
        slot = self._slab.acquire(slot_bytes, users=len(plan.layers))
        self._slab.view(slot)[: plan.x_bytes] = request.x
        self._metrics.slot_filled(time.perf_counter() - started)
        now = self._clock()
        return [
            WorkItem(
                sequence=next(self._sequence),
                key=_batch_key(spec.name, plan.x_dtype, plan.output_dtype),
                rows=plan.rows,
                slot=slot,
                nbytes=plan.x_bytes,
                enqueued_at=now,
                deadline=deadline,
                priority=plan.priority,
                traceparent=traceparent,
                client=client,
            )
            for spec in plan.layers
        ]


@lru_cache(maxsize=4096)
def _batch_key(layer: str, x_dtype: DType, output_dtype: DType) -> BatchKey:
    """Return one object for each key: the queue then compares identities, mostly."""
    return BatchKey(layer, x_dtype, output_dtype)
