"""Traces of calls: the caller's context as it arrives, and what is told to whoever makes spans.

Nothing here traces: `spans.py` does, where that is asked for. Plain texts and numbers travel with
the work, so that batches can be traced in another process than calls. Standard library only.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = [
    "BatchTrace",
    "CallTrace",
    "TracedOutcome",
    "Tracer",
    "kept_trace_id",
    "valid_traceparent",
]

# https://www.w3.org/TR/trace-context/: version-trace_id-parent_id-flags, lower-case hex, no id
# all zeros, no version ff. Version 00 ends there; later ones may append more after a dash.
_FORM = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-[!-~]*)?",
)
MAX_LENGTH = 512
SAMPLED = 1


def valid_traceparent(text: str) -> str | None:
    """Return `text` if it is a W3C traceparent, None if it is to be ignored."""
    if not text or len(text) > MAX_LENGTH:
        return None
    match = _FORM.fullmatch(text)
    if match is None or (text.startswith("00") and match["more"] is not None):
        return None
    return text


def kept_trace_id(traceparent: str | None) -> str:
    """Return the trace id of a valid traceparent; "" if there is none or its trace is not kept."""
    if traceparent is None or not int(traceparent[53:55], 16) & SAMPLED:
        return ""
    return traceparent[3:35]


class BatchTrace(NamedTuple):
    """One batch as the calls in it show it; seconds of the event loop's clock."""

    traceparent: str
    """Of the batch's own span."""
    began: float
    ended: float
    transfers: Sequence[tuple[str, int]]
    """Copies: the label `direction` of each, and its nanoseconds."""
    kernel_nanoseconds: int
    """0: it was not timed."""


class TracedOutcome(Protocol):
    """What a call's spans show of the answer for one of its layers."""

    @property
    def queue_nanoseconds(self) -> int:
        """From the queue to the first batch."""

    @property
    def batches(self) -> Sequence[BatchTrace]:
        """Those that computed it, in order."""


class CallTrace(Protocol):
    """One call that is traced, from its arrival to its end."""

    trace_id: str
    traceparent: str
    """Of the call's own span."""

    def answered(self, outcomes: Sequence[TracedOutcome], began: float, ended: float) -> None:
        """Show the way of a call that got its results, and when its reply was made."""

    def end(self, code: str) -> None:
        """End the call with the name of its status."""


class Tracer(Protocol):
    """Makes spans; called on the event loop."""

    def begin(
        self, method: str, traceparent: str | None, tracestate: str, began: float
    ) -> CallTrace | None:
        """Return the trace of a call that arrived at `began`; None if it is not to be traced."""

    def batch(self, layer: str, rows: int, calls: Sequence[str], trace: BatchTrace) -> BatchTrace:
        """Show a batch, linked to the spans of `calls`; return it with its own traceparent."""

    def close(self) -> None:
        """Send what is left, for a short while."""
