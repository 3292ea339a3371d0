"""The last seconds and minutes of a server, so that whoever looks sees them at once.

`tick` is called over and over by the metrics port's own thread and works every two seconds: the
event loop is not asked. What is kept is bounded: some snapshots, and a few numbers for each tick.
"""

import time
from collections import deque
from collections.abc import Callable

from qlinear_service.metrics import Metrics
from qlinear_service.watch.calls import calls_now
from qlinear_service.watch.document import Trend
from qlinear_service.watch.window import Window, take

__all__ = ["TICK_SECONDS", "TREND_POINTS", "History"]

TICK_SECONDS = 2.0
WINDOW_TICKS = 5
"""Figures are of the last ten seconds: five full ticks."""

TREND_POINTS = 150
"""Five minutes."""


class History:
    """Snapshots of the last seconds and the course of the last minutes.

    Args:
        metrics: what is looked at.
        clock: seconds; does not go back.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._families = metrics, metrics.families
        self._clock = clock
        first = take(self._families, clock())
        self._started = first.at_seconds
        self._snapshots = deque([first], maxlen=WINDOW_TICKS + 1)
        self._points: deque[tuple[float | None, ...]] = deque(maxlen=TREND_POINTS)

    def tick(self) -> None:
        """Remember the present if the last time is two seconds ago; for one thread only."""
        last = self._snapshots[-1]
        if self._clock() - last.at_seconds < TICK_SECONDS:
            return
        now = take(self._families, self._clock())
        step = Window(self._families, last, now)
        self._points.append(_point(step, max(1, len(self._metrics.devices))))
        self._snapshots.append(now)

    def window(self) -> Window:
        """Return the last ten seconds, or less if the server is younger; from any thread."""
        now = take(self._families, self._clock())
        # The oldest within ten seconds: between two ticks that is the second of the kept ones.
        kept = list(self._snapshots)
        longest = TICK_SECONDS * WINDOW_TICKS
        recent = [one for one in kept if now.at_seconds - one.at_seconds <= longest] or kept[-1:]
        return Window(self._families, recent[0], now)

    def uptime_seconds(self) -> float:
        """Return the time since the metrics port was opened."""
        return self._clock() - self._started

    def trend(self) -> Trend:
        """Return the course of the last five minutes, oldest first; from any thread."""
        columns = list(zip(*list(self._points), strict=True)) or [()] * 5
        calls, failed, p50, p99, busy = (list(column) for column in columns)
        return Trend(
            step_seconds=TICK_SECONDS,
            calls_per_second=calls,
            failed_per_second=failed,
            p50_seconds=p50,
            p99_seconds=p99,
            busy_ratio=busy,
        )


def _point(step: Window, devices: int) -> tuple[float | None, ...]:
    calls = calls_now(step)
    busy = step.rate("qlinear_kernel_busy_seconds_total") / devices
    rates = (calls["per_second"], calls["failed_per_second"])
    return (*rates, calls["p50_seconds"], calls["p99_seconds"], busy)
