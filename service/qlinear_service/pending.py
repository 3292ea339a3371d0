"""What the batcher remembers of calls that wait or run, and the one place that answers them."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from qlinear_service.batching import WorkItem
from qlinear_service.log_values import event
from qlinear_service.results import Answer, Outcome
from qlinear_service.tracing import BatchTrace

__all__ = ["Pending", "PendingCall", "Settle"]

logger = logging.getLogger(__name__)

Settle: TypeAlias = Callable[[Answer], None]
"""Told once how a call has ended, on the event loop. It does not call the batcher."""


class PendingCall:
    """What the items of one call share."""

    __slots__ = ("_settle", "is_settled", "items", "outcomes")

    def __init__(self, items: Sequence[WorkItem], settle: Settle) -> None:
        self.items = items
        self._settle = settle
        self.is_settled = False
        """It was answered, or nobody waits for an answer any more."""
        self.outcomes: dict[int, Outcome] = {}  # by sequence

    def answer(self, answer: Answer) -> None:
        """Give the caller its answer if it still waits for one: the only place that settles."""
        if self.is_settled:
            return
        self.is_settled = True
        try:
            self._settle(answer)
        except Exception as error:
            # One caller's fault must not end the loop that serves all.
            event(logger, logging.ERROR, "settle_failed", exc_info=error)


class Pending:
    """One item that waits or runs."""

    __slots__ = (
        *("batch_rows", "call", "item", "kernel_nanoseconds", "parts_running", "pieces"),
        *("queue_seconds", "rows_done", "traces"),
    )

    def __init__(self, item: WorkItem, call: PendingCall) -> None:
        self.item = item
        self.call = call
        self.pieces: dict[int, memoryview] = {}  # by first row
        self.parts_running = 0
        self.rows_done = 0
        self.batch_rows = 0
        self.queue_seconds = 0.0
        self.kernel_nanoseconds = 0
        self.traces: tuple[BatchTrace, ...] = ()

    def outcome(self) -> Outcome:
        """Return the answer to the item, all rows of which are done."""
        pieces = self.pieces
        if len(pieces) > 1:
            pieces = dict(sorted(pieces.items()))
        queue_nanoseconds = round(self.queue_seconds * 1e9)
        return Outcome(
            tuple(pieces.values()),
            self.batch_rows,
            queue_nanoseconds,
            self.kernel_nanoseconds,
            self.traces,
        )
