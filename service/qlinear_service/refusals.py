"""What to tell the callers of what a queue does not take, or takes no longer. Pure."""

from qlinear_service.errors import DeadlineExceeded, Overloaded, RequestError
from qlinear_service.work import WorkItem

__all__ = ["check_rows", "too_late", "too_old"]

RETRY_AFTER_SECONDS = 0.1
"""As for a full slab: some tens of batches of a large layer."""


def check_rows(waiting: int, rows: int, most: int) -> None:
    """Raise Overloaded if `rows` more than the `waiting` ones would be more than `most`."""
    if waiting + rows > most:
        raise Overloaded(
            f"{waiting} rows wait and this call brings {rows}; at most "
            f"{most} may wait: send it again later",
            retry_after_seconds=RETRY_AFTER_SECONDS,
            reason="queue_rows",
        )


def too_old(item: WorkItem, now: float, max_age_seconds: float) -> RequestError:
    """Return what to tell the caller of an item that waited longer than may be."""
    return Overloaded(
        f"the call for layer {item.key.layer!r} waited {now - item.enqueued_at:.3f} s, longer "
        f"than max_queue_age ({max_age_seconds:g} s): send it again later",
        retry_after_seconds=RETRY_AFTER_SECONDS,
        reason="queue_age",
    )


def too_late(item: WorkItem, now: float) -> RequestError:
    """Return what to tell the caller of an item whose deadline has passed."""
    return DeadlineExceeded(
        f"the deadline of the call for layer {item.key.layer!r} passed after it had waited "
        f"{now - item.enqueued_at:.3f} s; it was not computed"
    )
