"""What a run shows while it goes on, on stderr: one line that changes, or a line now and then."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from qlinear_service.loadgen.tally import Glance, Tally

__all__ = ["milliseconds", "show_progress"]

LIVE_SECONDS = 1.0
PLAIN_SECONDS = 5.0
"""Where lines pile up, in a file or a log."""


async def show_progress(tally: Tally, *, clock: Callable[[], float], console: Console) -> None:
    """Show what happens until cancelled."""
    failed: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        live = None
        if console.is_terminal:
            # Refreshed by hand: a second thread would disturb what is being timed.
            live = stack.enter_context(Live(console=console, auto_refresh=False, transient=True))
        while True:
            await asyncio.sleep(LIVE_SECONDS if live else PLAIN_SECONDS)
            glance = tally.glance(clock())
            failed.update(glance.failed)
            line = f"{_phase(tally, clock())}  {_described(glance, failed)}"
            if live:
                live.update(Text(line), refresh=True)
            else:
                console.print(line, markup=False, highlight=False, soft_wrap=True)


def milliseconds(seconds: float | None) -> str:
    """Return a duration for people, three digits or so."""
    if seconds is None:
        return "-"
    value = seconds * 1000
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _phase(tally: Tally, now: float) -> str:
    window = tally.window
    if now < window.opens:
        return f"warm-up, {window.opens - now:.0f} s left"
    if now < window.closes:
        return f"{now - window.opens:.0f} of {window.closes - window.opens:.0f} s"
    return "waiting for the last answers"


def _described(glance: Glance, failed: Counter[str]) -> str:
    latency = f"p50 {milliseconds(glance.p50_seconds)} p99 {milliseconds(glance.p99_seconds)} ms"
    parts = [f"{glance.answered_per_second:,.0f} calls/s", latency, f"{glance.in_flight} in flight"]
    if failed:
        parts.append("failed " + ", ".join(f"{n} {code}" for code, n in sorted(failed.items())))
    return "  ".join(parts)
