"""How a checked call reaches the engine and its results come back.

`Transport` is all that the servicer knows. `LocalTransport` serves front ends that live in the
engine's own process; one that talks to another process through the same slots and descriptors
takes its place without a change elsewhere. Holds no message and no tensor.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

from qlinear_service.batcher import Batcher, Outcome
from qlinear_service.batching import BatchKey, WorkItem
from qlinear_service.codec import CheckedRequest
from qlinear_service.slots import Slab

__all__ = ["LocalTransport", "Transport"]


class Transport(Protocol):
    """Carries one call to the engine and back."""

    async def call(self, request: CheckedRequest, *, deadline: float | None) -> list[Outcome]:
        """Return one outcome for each layer asked for, in order.

        Args:
            request: checked, of 1 or more rows; its bytes are copied before the first await.
            deadline: on the event loop's clock; the call is not computed after it.

        Raises:
            RequestError: the call, all of it, has failed.
        """
        ...


class LocalTransport:
    """Slab, queue and front end in one process.

    Args:
        slab: where activations are copied to.
        batcher: takes the descriptors.
        clock: the event loop's.
    """

    def __init__(self, *, slab: Slab, batcher: Batcher, clock: Callable[[], float]) -> None:
        self._slab = slab
        self._batcher = batcher
        self._clock = clock
        self._sequence = itertools.count(1)

    async def call(self, request: CheckedRequest, *, deadline: float | None) -> list[Outcome]:
        """See `Transport.call`. Cancelling it drops what of the call has not begun to run."""
        items = self._enter(request, deadline)
        future = self._batcher.submit(items)
        try:
            return await future
        except asyncio.CancelledError:
            self._batcher.cancel(items)
            raise

    def _enter(self, request: CheckedRequest, deadline: float | None) -> list[WorkItem]:
        """Copy the activations into a slot and describe them, once for each layer."""
        # Before the copy: a full queue must not cost one. Nothing can come between the two.
        self._batcher.check_room(request.rows * len(request.layers))
        # One slot for the call, paid for by the larger of what comes in and what goes out.
        slot_bytes = max(request.x.nbytes, request.response_bytes)
        slot = self._slab.acquire(slot_bytes, users=len(request.layers))
        self._slab.view(slot)[: request.x.nbytes] = request.x
        now = self._clock()
        return [
            WorkItem(
                sequence=next(self._sequence),
                key=BatchKey(spec.name, request.x_dtype, request.output_dtype),
                rows=request.rows,
                slot=slot,
                nbytes=request.x.nbytes,
                enqueued_at=now,
                deadline=deadline,
                priority=request.priority,
            )
            for spec in request.layers
        ]
