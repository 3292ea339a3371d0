"""Computations that were not timed, as a GPU's dispatcher times few of many."""

import pytest
from measured_layers import ROOFLINE, Spec, compute, metrics_of, scrape, value

UP = Spec("up", n=16)


def test_what_was_not_timed_counts_with_the_time_of_the_last_one_like_it() -> None:
    metrics = metrics_of(UP)
    for rows, seconds, is_timed in (
        *((1, 0.5, False), (1, 0.25, True), (1, 0.5, False), (1, 0.125, True)),
        *((16, 1.0, True), (1, 1.0, False)),
    ):
        compute(metrics, "m/up", rows, seconds, is_timed=is_timed)
    samples = scrape(metrics)
    for m, launches, timed, busy in (
        ("1", 5, 2, 0.5 + 0.25 + 0.25 + 0.125 + 0.125),
        ("16", 1, 1, 1),
    ):
        labels = {"shape": UP.shape, "m": m, "device": "cpu"}
        assert value(samples, "qlinear_kernel_seconds_count", **labels) == timed
        assert value(samples, "qlinear_kernel_busy_seconds_total", **labels) == busy
        nbytes = launches * (16 * 8 // 2 + 2 * 16 + int(m) * (8 * 2 + 16 * 4))
        assert value(samples, "qlinear_kernel_bytes_total", **labels) == nbytes
    # Of other rows, in proportion to the shortest time that each could have taken.
    metrics = metrics_of(UP, roofline=ROOFLINE)
    for rows, seconds, is_timed in ((16, 0.5, True), (12, 0.5, False)):
        compute(metrics, "m/up", rows, seconds, is_timed=is_timed)
    busy = value(scrape(metrics), "qlinear_kernel_busy_seconds_total", **labels)
    floors = [ROOFLINE.floor_seconds(96 + rows * 80, rows * 128) for rows in (16, 12)]
    assert busy == pytest.approx(0.5 + 0.5 * floors[1] / floors[0])
