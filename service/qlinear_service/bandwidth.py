"""Computations counted by shape and rows: their times and bytes, for ever and for the last 10 s.

Those of each device by themselves; a batch that several compute is one launch on each.

Told on the event loop; `Launches.live` may be asked from any thread. Knows the families by name
and the time as a clock that is handed in.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from qlinear_service.measured import MeasuredDevice, MeasuredLayer, Share
from qlinear_service.metric_families import Family, Histogram
from qlinear_service.roofline import Roofline

__all__ = ["WINDOW_SECONDS", "Batches", "Launches", "Live", "together"]

WINDOW_SECONDS = 10
"""Of whole seconds of the clock: the running one and those before it."""


@dataclass(slots=True, eq=False)
class Batches:
    """What the batches of one layer need, looked up once; series of its shape."""

    shape: str
    k: int
    n: int
    shares: Mapping[str, Share]
    """By device, where it is."""
    rows: Histogram
    requests: Histogram

    @classmethod
    def of(
        cls,
        measured: MeasuredLayer,
        devices: Iterable[MeasuredDevice],
        families: Mapping[str, Family],
    ) -> "Batches":
        """Return what those of `measured` need."""
        spec = measured.spec
        shares = ((device.name, device.share_of(measured)) for device in devices)
        return cls(
            shape=spec.shape,
            k=spec.k,
            n=spec.n,
            shares={name: share for name, share in shares if share is not None},
            rows=families["qlinear_batch_rows"].histogram(spec.shape),
            requests=families["qlinear_batch_requests"].histogram(spec.shape),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What computations of one shape and m did in the last seconds; one at least ran."""

    shape: str
    m: str
    launches: int
    batches: float
    """Fewer than launches where several devices compute one together."""
    rows: float
    """Of those batches."""
    nbytes: int
    busy_seconds: float
    floor_seconds: float
    """The shortest time in which they could have run; 0 where that was not measured."""

    @property
    def bytes_per_second(self) -> float:
        """Effective memory bandwidth."""
        return self.nbytes / self.busy_seconds

    @property
    def roofline_ratio(self) -> float | None:
        """Shortest possible over measured time."""
        return self.floor_seconds / self.busy_seconds if self.floor_seconds else None


class _Second:
    """Sums of one second."""

    __slots__ = (
        *("batches", "busy_seconds", "floor_seconds", "launches", "nbytes", "rows", "second"),
    )

    def __init__(self, second: int) -> None:
        self.second = second
        self.launches = self.nbytes = 0
        self.batches = self.rows = self.busy_seconds = self.floor_seconds = 0.0


class _Series:
    """All of one shape and m: series for ever, and a ring of seconds."""

    __slots__ = ("busy_seconds", "last_floor", "last_seconds", "nbytes", "ring", "seconds")

    def __init__(self, families: Mapping[str, Family], labels: tuple[str, ...]) -> None:
        self.seconds = families["qlinear_kernel_seconds"].histogram(*labels)
        self.nbytes = families["qlinear_kernel_bytes_total"].number(*labels)
        self.busy_seconds = families["qlinear_kernel_busy_seconds_total"].number(*labels)
        self.ring = [_Second(-WINDOW_SECONDS)] * WINDOW_SECONDS
        self.last_seconds = self.last_floor = 0.0
        """Of the last one that was timed."""

    def second(self, second: int) -> _Second:
        """Return the sums of that second, the running one."""
        place = second % WINDOW_SECONDS
        if self.ring[place].second != second:
            self.ring[place] = _Second(second)
        return self.ring[place]


class Launches:
    """Computations of one device, by shape and m.

    Args:
        families: where the series live.
        device: their label.
        clock: seconds.
        roofline: what the device was measured to do, if it was.
    """

    def __init__(
        self,
        families: Mapping[str, Family],
        *,
        device: str,
        clock: Callable[[], float],
        roofline: Roofline | None = None,
    ) -> None:
        self.roofline = roofline
        self._families = families
        self._device = device
        self._clock = clock
        self._series: dict[tuple[str, str], _Series] = {}

    def add(
        self,
        shape: str,
        m: str,
        *,
        rows: int,
        nbytes: int,
        products: int,
        seconds: float,
        is_timed: bool = True,
        share: float = 1.0,
    ) -> None:
        """Count one computation.

        Args:
            shape: the layer's.
            m: the label of its rows.
            rows: of x and y.
            nbytes: what it reads and writes, each once.
            products: multiply-adds.
            seconds: what it took.
            is_timed: that was measured. Else it counts with what the last one of its shape and m
                took that was, as its floor is longer or shorter, or with `seconds` before there is
                one.
            share: of the batch's results, that this device computes.
        """
        series = self._series.get((shape, m))
        if series is None:
            series = self._series[shape, m] = _Series(self._families, (shape, m, self._device))
        floor = 0.0
        if self.roofline is not None:
            floor = self.roofline.floor_seconds(nbytes, products)
        if is_timed:
            series.seconds.observe(seconds)
            series.last_seconds, series.last_floor = seconds, floor
        elif series.last_seconds:
            seconds = series.last_seconds * (floor / series.last_floor if floor else 1)
        series.nbytes.value += nbytes
        series.busy_seconds.value += seconds
        now = series.second(int(self._clock()))
        now.launches += 1
        now.batches += share
        now.rows += rows * share
        now.nbytes += nbytes
        now.busy_seconds += seconds
        now.floor_seconds += floor

    def live(self) -> Iterator[Live]:
        """Yield what ran in the last seconds, for each shape and m that did."""
        oldest = int(self._clock()) - WINDOW_SECONDS
        for (shape, m), series in list(self._series.items()):
            recent = [second for second in series.ring if second.second > oldest]
            live = Live(
                shape=shape,
                m=m,
                launches=sum(second.launches for second in recent),
                batches=sum(second.batches for second in recent),
                rows=sum(second.rows for second in recent),
                nbytes=sum(second.nbytes for second in recent),
                busy_seconds=sum(second.busy_seconds for second in recent),
                floor_seconds=sum(second.floor_seconds for second in recent),
            )
            if live.busy_seconds:
                yield live


def together(found: Iterable[Live]) -> list[Live]:
    """Return what all devices did for each shape and m, the busiest first."""
    by_series: dict[tuple[str, str], list[Live]] = {}
    for one in found:
        by_series.setdefault((one.shape, one.m), []).append(one)
    sums = [
        Live(
            shape=shape,
            m=m,
            launches=sum(one.launches for one in same),
            batches=sum(one.batches for one in same),
            rows=sum(one.rows for one in same),
            nbytes=sum(one.nbytes for one in same),
            busy_seconds=sum(one.busy_seconds for one in same),
            floor_seconds=sum(one.floor_seconds for one in same),
        )
        for (shape, m), same in by_series.items()
    ]
    return sorted(sums, key=lambda one: -one.busy_seconds)
