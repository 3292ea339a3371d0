"""The load generator's parts: histograms, schedules and both loops."""

import asyncio
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from virtual_time import VirtualLoop, run_virtually

from qlinear_service.errors import ConfigError
from qlinear_service.loadgen import traffic as traffic_module
from qlinear_service.loadgen.drive import drive_closed, drive_open
from qlinear_service.loadgen.histogram import Histogram
from qlinear_service.loadgen.tally import Answer, Tally, Window
from qlinear_service.loadgen.traffic import PAYLOADS, Payloads, Request, Traffic, arrivals

ONE = Request("m/a", 2, "float16", 0)
SERVICE_SECONDS = 0.001


def endless() -> Iterator[Request]:
    return itertools.repeat(ONE)


# -- histogram ------------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", [0.1, 50, 90, 99, 99.9, 100])
@pytest.mark.parametrize("scale", [1e-8, 1e-3, 10.0])
def test_percentiles_are_exact_within_half_a_bucket(percent: float, scale: float) -> None:
    values = np.random.default_rng(1).lognormal(0, 2, 20_000) * scale
    histogram = Histogram()
    for value in values:
        histogram.record(float(value))
    # The least value that so many do not exceed; numpy's own ranks are off by one at 99.9.
    exact = np.sort(values)[math.ceil(Fraction(str(percent)) * len(values) / 100) - 1]
    # Half a bucket of 1/128, and the rounding to whole nanoseconds.
    assert histogram.percentile(percent) == pytest.approx(exact, rel=1 / 256 + 1e-9, abs=1e-9)
    assert histogram.max_seconds == values.max()


def test_every_duration_has_a_bucket_of_its_size_and_memory_is_bounded() -> None:
    histogram = Histogram()
    for exponent in range(0, 44):
        for step in range(1000):
            histogram.record((2**exponent + step * 2**exponent // 1000) * 1e-9)
    assert len(histogram._counts) <= 44 * 128
    assert histogram.count == 44_000


def test_small_and_empty_histograms() -> None:
    histogram = Histogram()
    assert histogram.percentile(99) is None
    histogram.record(-1e-9)  # a clock that was set back must not break a run
    assert histogram.percentile(50) == 0
    histogram.record(0.25)
    assert histogram.percentile(99) == pytest.approx(0.25, rel=1 / 256)


def test_merging_is_recording_together() -> None:
    one, two, both = Histogram(), Histogram(), Histogram()
    for number, value in enumerate(np.random.default_rng(2).exponential(0.01, 1000)):
        (one if number % 3 else two).record(float(value))
        both.record(float(value))
    one.merge(two)
    assert (one._counts, one.count, one.max_seconds) == (
        both._counts,
        both.count,
        both.max_seconds,
    )


# -- schedule -------------------------------------------------------------------------------------


def test_arrivals_are_a_poisson_process() -> None:
    rate, count = 200.0, 20_000
    instants = np.array(list(itertools.islice(arrivals(rate, 7), count)))
    gaps = np.diff(instants, prepend=0.0)
    assert (gaps > 0).all()
    # Mean and standard deviation of an exponential gap are both 1/rate; 5 standard errors.
    assert gaps.mean() * rate == pytest.approx(1, abs=5 / count**0.5)
    assert gaps.std() * rate == pytest.approx(1, abs=5 * (2 / count) ** 0.5)
    # Counts in windows of 50 ms: mean and variance of a Poisson count are both 10.
    counts = np.histogram(instants, bins=np.arange(0, instants[-1], 0.05))[0]
    assert counts.mean() == pytest.approx(10, rel=0.03)
    assert counts.var() == pytest.approx(10, rel=0.15)
    # Memoryless: a gap says nothing about the next.
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 5 / count**0.5


def test_a_seed_repeats_the_traffic_and_another_does_not() -> None:
    def drawn(seed: int) -> tuple[list[Request], list[float], bytes]:
        names = ["m/a", "m/b"]
        traffic = Traffic(layers=names, rows=[1, 16], dtypes=["float16", "float32"], seed=seed)
        payloads = Payloads(k_of={"m/a": 8, "m/b": 8}, max_rows=16, dtypes=["float16"], seed=seed)
        x = payloads[Request("m/b", 16, "float16", 3)]
        return (
            list(itertools.islice(traffic, 400)),
            list(itertools.islice(arrivals(10, seed), 400)),
            x.tobytes(),
        )

    assert drawn(5) == drawn(5)
    for one, other in zip(drawn(5), drawn(6), strict=True):
        assert one != other


def test_every_kind_is_as_likely() -> None:
    traffic = Traffic(layers=["m/a", "m/b"], rows=[1, 2, 3], dtypes=["float16"], seed=3)
    kinds = [(r.layer, r.rows, r.payload) for r in itertools.islice(traffic, 24_000)]
    counts = np.unique(np.array(kinds), axis=0, return_counts=True)[1]
    assert len(counts) == 2 * 3 * PAYLOADS
    assert counts.min() > 850
    assert counts.max() < 1150


def test_payloads_differ_and_share_memory() -> None:
    payloads = Payloads(k_of={"m/a": 8}, max_rows=3000, dtypes=["float16"], seed=1)
    large = [payloads[Request("m/a", 3000, "float16", p)] for p in range(PAYLOADS)]
    assert {x.shape for x in large} == {(3000, 8)}
    assert len({x.tobytes() for x in large}) == PAYLOADS
    assert all(np.shares_memory(large[0], x) for x in large)
    # Rows repeat, but never at a distance that is a power of two.
    assert not any((large[0][0] == large[0][2**i]).all() for i in range(11))


def test_bfloat16_without_ml_dtypes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "ml_dtypes", None)
    with pytest.raises(ConfigError, match="ml_dtypes"):
        Payloads(k_of={"m/a": 8}, max_rows=1, dtypes=["bfloat16"], seed=1)


# -- loops ----------------------------------------------------------------------------------------


class FakeServer:
    """Answers one call after the other, 1 ms each; stands still from 2 s to 3 s."""

    def __init__(self, loop: VirtualLoop, stall: tuple[float, float] = (2.0, 3.0)) -> None:
        self._loop = loop
        self._stall = stall
        self._turn = asyncio.Lock()
        self.most_waiting = 0
        self.waiting = 0

    async def send(self, request: Request) -> Answer:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        async with self._turn:
            begin, end = self._stall
            if begin <= self._loop.time() < end:
                await asyncio.sleep(end - self._loop.time())
            await asyncio.sleep(SERVICE_SECONDS)
        self.waiting -= 1
        return Answer(nbytes=10)


def open_loop(
    server: Any, loop: VirtualLoop, *, rate: float, seconds: float = 10, most: int = 10_000
) -> Tally:
    tally = Tally(Window(0.0, seconds))
    driving = drive_open(
        endless(),
        server.send,
        tally,
        due_times=arrivals(rate, 1),
        max_in_flight=most,
        clock=loop.time,
    )
    run_virtually(driving, loop)
    return tally


def test_the_open_loop_shows_a_stall_that_the_closed_loop_hides() -> None:
    loop = VirtualLoop()
    total = open_loop(FakeServer(loop), loop, rate=200).total()
    # A tenth of all calls fell due during the stall of 1 s and waited half of it on average.
    assert total.answered == total.sent > 1900
    p99, p50 = total.latency.percentile(99), total.latency.percentile(50)
    assert p99 is not None
    assert p50 is not None
    assert 0.8 < p99 < 1.05
    assert p50 < 0.01

    loop = VirtualLoop()
    tally = Tally(Window(0.0, 10.0))
    server = FakeServer(loop)
    driving = drive_closed(endless(), server.send, tally, concurrency=1, clock=loop.time)
    run_virtually(driving, loop)
    closed = tally.total().latency
    # One caller, one slow call: the closed loop's p99 knows nothing of it.
    assert closed.percentile(99) == pytest.approx(SERVICE_SECONDS, rel=0.01)
    assert closed.max_seconds == pytest.approx(1.0, abs=0.01)


def test_a_generator_that_is_held_up_counts_from_when_calls_were_due() -> None:
    loop = VirtualLoop()

    class Blocking(FakeServer):
        async def send(self, request: Request) -> Answer:
            if 2.0 <= loop.time() < 2.1:
                loop.pass_time(0.5)  # this program itself, not the server
            return Answer()

    total = open_loop(Blocking(loop), loop, rate=200).total()
    assert 80 <= total.late <= 120
    assert total.sent == total.answered
    # A twentieth of all calls fell due meanwhile; from when they were sent, they took no time.
    p99, p90 = total.latency.percentile(99), total.latency.percentile(90)
    assert p99 is not None
    assert p99 > 0.35
    assert p90 == 0


def test_calls_beyond_the_limit_are_counted_as_not_sent() -> None:
    loop = VirtualLoop()
    server = FakeServer(loop)
    total = open_loop(server, loop, rate=200, most=20).total()
    assert server.most_waiting == 20
    # About 200 fell due during the stall.
    assert 150 < total.not_sent < 210
    assert total.sent == total.answered
    due = sum(1 for _ in itertools.takewhile(lambda t: t < 10, arrivals(200, 1)))
    assert total.sent + total.not_sent == due


def test_the_closed_loop_keeps_its_number_and_the_windows_edges() -> None:
    loop = VirtualLoop()
    server = FakeServer(loop, stall=(99, 99))
    tally = Tally(Window(1.0, 3.0))
    run_virtually(drive_closed(endless(), server.send, tally, concurrency=4, clock=loop.time), loop)
    total = tally.total()
    assert server.most_waiting == 4
    assert tally.in_flight == 0
    # 1,000 answers a second, warm-up left out; rates count what arrived in the window.
    assert total.answered == pytest.approx(2000, abs=5)
    assert total.rows_done == pytest.approx(2 * 2000, abs=10)
    assert total.bytes_done == pytest.approx(10 * 2000, abs=50)


def test_failures_are_counted_by_code_and_callers_pause() -> None:
    loop = VirtualLoop()
    tally = Tally(Window(0.0, 0.95))

    async def refuse(request: Request) -> Answer:
        return Answer(code="UNAVAILABLE", pause_seconds=0.1)

    run_virtually(drive_closed(endless(), refuse, tally, concurrency=2, clock=loop.time), loop)
    total = tally.total()
    assert total.failed == {"UNAVAILABLE": 20}
    assert total.answered == total.rows_done == total.latency.count == 0
    assert tally.glance(1.0).failed == {"UNAVAILABLE": 20}
    assert tally.glance(2.0).failed == {}


def test_a_mistake_of_the_program_ends_the_run() -> None:
    loop = VirtualLoop()

    async def broken(request: Request) -> Answer:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        run_virtually(
            drive_closed(endless(), broken, Tally(Window(0, 1)), concurrency=2, clock=loop.time),
            loop,
        )
