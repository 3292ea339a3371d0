"""What came back: counts, failures, rates and latencies for each kind of request.

Only calls that begin inside the window (after the warm-up, before the end) are counted; rates
count the answers that arrive inside it. Pure: every instant is handed in.
"""

from collections import Counter
from dataclasses import dataclass, field

from qlinear_service.loadgen.histogram import Histogram
from qlinear_service.loadgen.traffic import Request

__all__ = ["Answer", "Glance", "Kind", "Series", "Tally", "Window"]

Kind = tuple[str, int, str]
"""Layer, rows, dtype."""


@dataclass(frozen=True, slots=True)
class Window:
    """The measured time: seconds on the clock of the run."""

    opens: float
    closes: float

    def __contains__(self, instant: float) -> bool:
        return self.opens <= instant < self.closes


@dataclass(frozen=True, slots=True)
class Answer:
    """How one call ended."""

    code: str | None = None
    """Name of the status it failed with; None: it was answered."""
    nbytes: int = 0
    """Activations and results together."""
    pause_seconds: float = 0.0
    """How long a caller that waits for answers leaves the server alone."""


@dataclass(slots=True)
class Series:
    """One line of the report."""

    sent: int = 0
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    late: int = 0
    """Sent after their instant, because the generator itself was behind."""
    not_sent: int = 0
    """Due while as many calls as allowed were in flight."""
    rows_done: int = 0
    bytes_done: int = 0
    latency: Histogram = field(default_factory=Histogram)

    def merge(self, other: "Series") -> None:
        """Add everything that `other` holds."""
        for name in ("sent", "answered", "late", "not_sent", "rows_done", "bytes_done"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failed.update(other.failed)
        self.latency.merge(other.latency)

    @property
    def unanswered(self) -> int:
        """Sent and cut off when the run was interrupted."""
        return self.sent - self.answered - self.failed.total()


@dataclass(frozen=True, slots=True)
class Glance:
    """What happened since the last glance, warm-up included."""

    answered_per_second: float
    p50_seconds: float | None
    p99_seconds: float | None
    failed: dict[str, int]
    in_flight: int


class Tally:
    """Gathers what happens to calls; one for each run."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.series: dict[Kind, Series] = {}
        self.in_flight = 0
        self._glanced = window.opens
        self._recent = Series()

    def note_not_sent(self, request: Request, due: float) -> None:
        """Count a call that was due and left out."""
        if due in self.window:
            self._of(request).not_sent += 1

    def note_sent(self, request: Request, begun: float, *, late: bool = False) -> None:
        """Count a call that goes out now.

        Args:
            request: what it is.
            begun: when it was due; in a closed loop that is now.
            late: it goes out noticeably after that.
        """
        self.in_flight += 1
        if begun in self.window:
            series = self._of(request)
            series.sent += 1
            series.late += late

    def note_end(self, request: Request, begun: float, ended: float, answer: Answer) -> None:
        """Count how a call ended that was noted as sent."""
        self.in_flight -= 1
        if begun in self.window:
            _count_end(self._of(request), ended - begun, answer)
        _count_end(self._recent, ended - begun, answer)
        if ended in self.window and answer.code is None:
            series = self._of(request)
            series.rows_done += request.rows
            series.bytes_done += answer.nbytes

    def glance(self, now: float) -> Glance:
        """Return what happened since the last glance."""
        recent, self._recent = self._recent, Series()
        seconds = max(now - self._glanced, 1e-9)
        self._glanced = now
        return Glance(
            answered_per_second=recent.answered / seconds,
            p50_seconds=recent.latency.percentile(50),
            p99_seconds=recent.latency.percentile(99),
            failed=dict(recent.failed),
            in_flight=self.in_flight,
        )

    def total(self) -> Series:
        """Return all kinds together."""
        total = Series()
        for series in self.series.values():
            total.merge(series)
        return total

    def _of(self, request: Request) -> Series:
        return self.series.setdefault((request.layer, request.rows, request.dtype), Series())


def _count_end(series: Series, seconds: float, answer: Answer) -> None:
    if answer.code is None:
        series.answered += 1
        series.latency.record(seconds)
    else:
        series.failed[answer.code] += 1
