"""Rates and times of calls in a window, and where a call's time goes."""

from collections.abc import Mapping

from qlinear_service.watch.document import Calls, Part, TimeOfCall
from qlinear_service.watch.window import Window

__all__ = ["calls_now", "refused_for_load", "time_of_call"]

FAILURES = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS", "DEADLINE_EXCEEDED")
"""Codes that are the server's affair, as in deploy/prometheus; refusals for load come to them."""


def refused_for_load(rejected_per_second: Mapping[str, float]) -> float:
    """Return the rate of refusals by the queue, of all refusals by their reason."""
    rates = rejected_per_second.items()
    return sum(rate for reason, rate in rates if reason.startswith("queue_"))


def calls_now(window: Window) -> Calls:
    """Return rates and times of calls over all layers and methods."""
    codes = window.rates("qlinear_requests_total", "code")
    failed = sum(codes.get(code, 0.0) for code in FAILURES) + refused_for_load(
        window.rates("qlinear_rejected_total", "reason")
    )
    per_second = sum(codes.values())
    times = window.all_sums("qlinear_request_seconds")
    return Calls(
        per_second=per_second,
        failed_per_second=failed,
        failed_ratio=min(failed / per_second, 1.0) if per_second else 0.0,
        p50_seconds=times.quantile(0.5),
        p99_seconds=times.quantile(0.99),
        rows_per_second=window.all_sums("qlinear_batch_rows").total / window.seconds,
    )


def time_of_call(window: Window) -> TimeOfCall:
    """Return means of each stop. A call meets some in turn, so that they need not add up."""
    mean = window.all_sums("qlinear_request_seconds").mean
    copies = window.sums("qlinear_transfer_seconds", "direction")
    known = {
        "queue": window.all_sums("qlinear_queue_seconds").mean or 0.0,
        "copies": sum(one.mean or 0.0 for one in copies.values()),
        "kernel": window.all_sums("qlinear_kernel_seconds").mean or 0.0,
        "reply": window.all_sums("qlinear_reply_seconds").mean or 0.0,
    }
    rest = max((mean or 0.0) - sum(known.values()), 0.0)
    parts = [Part(name=name, seconds=one) for name, one in {**known, "rest": rest}.items()]
    return TimeOfCall(mean_seconds=mean, parts=parts)
