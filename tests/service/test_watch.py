"""The document at /now.json: exact numbers after known traffic, and bounds that nothing passes."""

import base64
import hashlib
import json
import re

import pytest
from measured_layers import ROOFLINE, TELEMETRY, Layer, Spec, compute, everything, metrics_of
from watched_metrics import HOSTILE, Clock, busy, crowd, traffic

from qlinear_service.measured import MeasuredDevice, Share
from qlinear_service.metrics import Metrics
from qlinear_service.watch.history import TICK_SECONDS, TREND_POINTS, History
from qlinear_service.watch.now import now, to_json
from qlinear_service.watch.page import PAGE, POLICY

UP, DOWN = Spec("up", n=16), Spec("down", n=32)


def watched(*specs: Spec) -> tuple[Metrics, Clock, History]:
    clock = Clock()
    metrics = metrics_of(*specs, roofline=ROOFLINE, clock=clock, waiting={"m/up": 3})
    return metrics, clock, History(metrics, clock)


def test_rates_times_and_shares_are_those_of_the_window() -> None:
    metrics, clock, history = watched(UP, DOWN)
    for _ in range(3):
        metrics.call_finished("MatMul", ["up"], "OK", 0.002)
    clock.seconds += 60
    history.tick()
    for _ in range(30):  # what came before is no part of the window
        metrics.call_finished("MatMul", ["up"], "OK", 0.002)
    metrics.call_finished("MatMulStream", ["down"], "INTERNAL", 9.0)
    metrics.call_finished("MatMul", ["x"], "RESOURCE_EXHAUSTED", 0.0, reason="queue_rows")
    compute(metrics, "m/up", 4, seconds=0.5)
    compute(metrics, "m/up", 8, seconds=0.5)
    metrics.slot_filled(1e-3)
    metrics.replied(2e-3)
    clock.seconds += 8
    found = now(metrics, history)
    assert found["window_seconds"] == 8
    calls = found["calls"]
    assert calls["per_second"] == 32 / 8
    assert calls["failed_per_second"] == 2 / 8
    assert calls["failed_ratio"] == pytest.approx(2 / 32)
    assert calls["rows_per_second"] == 12 / 8
    # All within the bucket of 1 to 3 ms.
    assert calls["p50_seconds"] == pytest.approx(0.002)
    assert calls["p99_seconds"] == pytest.approx(0.00298)
    assert found["machine"]["busy_ratio"] == 1 / 8
    parts = {part["name"]: part["seconds"] for part in found["time"]["parts"]}
    assert found["time"]["mean_seconds"] == pytest.approx(0.002)
    assert parts == pytest.approx(
        {"queue": 2e-3, "copies": 1e-3 + 1e-5, "kernel": 0.5, "reply": 2e-3, "rest": 0.0}
    )
    assert found["queue"]["rows"] == 3
    assert found["queue"]["rejected_per_second"] == {"queue_rows": 1 / 8}
    names = [layer["name"] for layer in found["layers"]]
    assert names == ["m/up", "m/down"]
    assert found["layers"][0]["calls_per_second"] == 30 / 8


def test_bandwidth_and_place_on_the_roofline_are_exact() -> None:
    metrics, _, history = watched(UP, DOWN)
    for rows in (4, 8):
        compute(metrics, "m/up", rows, seconds=0.5)
    found = now(metrics, history)
    up, down = found["shapes"]
    assert (up["shape"], down["shape"]) == (UP.shape, DOWN.shape)
    (rows,) = up["rows"]
    nbytes = 2 * (16 * 8 // 2 + 2 * 16) + 12 * (8 * 2 + 16 * 4)
    assert rows["m"] == "8"
    assert rows["bytes_per_second"] == up["bytes_per_second"] == nbytes / 1.0
    assert rows["products_per_byte"] == pytest.approx(12 * 16 * 8 / nbytes)
    assert rows["products_per_second"] == pytest.approx(12 * 16 * 8)
    floor = sum(ROOFLINE.floor_seconds(96 + m * 80, m * 128) for m in (4, 8))
    assert rows["roofline_ratio"] == up["roofline_ratio"] == pytest.approx(floor)
    assert found["machine"]["peak_bytes_per_second"] == pytest.approx(1e8)
    assert found["machine"]["large_bytes_per_second"] == pytest.approx(200 / 4e-6)
    assert found["machine"]["peak_products_per_second"] == 1e9
    assert down["rows"] == []
    assert (down["bytes_per_second"], down["p50_seconds"], down["batch_rows"]) == (None,) * 3


def test_the_window_is_ten_seconds_and_the_trend_five_minutes_whatever_happens() -> None:
    metrics, clock, history = watched(UP)
    for step in range(400):
        metrics.call_finished("MatMul", ["up"], "OK", 0.002)
        for _ in range(32):  # asked all the time, it works every two seconds
            clock.seconds += TICK_SECONDS / 32
            history.tick()
        assert history.window().seconds <= 10 + 1e-6
        assert history.window().seconds >= min(8.0, step * TICK_SECONDS)
    trend = history.trend()
    assert len(trend["calls_per_second"]) == TREND_POINTS
    assert trend["calls_per_second"][-1] == pytest.approx(1 / TICK_SECONDS)
    assert len(history._snapshots) < 10
    assert history.uptime_seconds() == pytest.approx(400 * TICK_SECONDS)


def test_a_server_that_starts_has_a_document() -> None:
    metrics = metrics_of()
    metrics.load, metrics.state = None, lambda: "starting"
    found = now(metrics, History(metrics))
    assert found["answers"]["healthy"]["level"] == "fair"
    assert found["answers"]["machine"]["level"] == "idle"
    assert (found["layers"], found["shapes"], found["queue"]["limit_bytes"]) == ([], [], 0)
    json.loads(to_json(found))


def test_all_that_a_gpu_tells_is_passed_on() -> None:
    metrics = metrics_of(UP, telemetry=TELEMETRY | {("qlinear_gpu_power_watts",): float("nan")})
    everything(metrics)
    gauges = json.loads(to_json(now(metrics, History(metrics))))["machine"]["gauges"]
    assert gauges["throttled"] == 1
    assert gauges["power_watts"] is None
    assert set(gauges) == {name.removeprefix("qlinear_gpu_") for name, *_ in TELEMETRY}


def test_the_document_is_bounded_and_is_json_whatever_is_loaded() -> None:
    metrics = busy(crowd(5000, shapes=1000, length=3000) + [Spec(name, n=8) for name in HOSTILE])
    history = History(metrics)
    traffic(metrics, crowd(10, shapes=10, length=3000))
    text = to_json(now(metrics, history))
    assert len(text) < 400_000
    found = json.loads(text)
    assert (len(found["layers"]), found["layers_total"]) == (400, 5005)
    assert len(found["shapes"]) + found["shapes_left_out"] == 1001
    assert max(len(layer["name"]) for layer in found["layers"]) <= 160
    # Those that are asked for are not the ones that are left out.
    assert sum(layer["calls_per_second"] > 0 for layer in found["layers"]) == 10


def test_200_layers_are_a_small_document() -> None:
    metrics = busy(crowd(200, shapes=6, length=60))
    assert len(to_json(now(metrics, History(metrics)))) < 60_000


def test_the_page_is_small_and_needs_nothing_from_elsewhere() -> None:
    assert len(PAGE) < 100_000
    page = PAGE.decode()
    for foreign in ("http:", "https:", "//", "src=", "url(", "@import", "innerHTML", "@STYLE"):
        assert foreign not in page, foreign


def test_the_policy_names_the_pages_own_script_and_style_only() -> None:
    (script,) = re.findall(rb"<script>(.*?)</script>", PAGE, re.S)
    (style,) = re.findall(rb"<style>(.*?)</style>", PAGE, re.S)
    assert "unsafe" not in POLICY
    digests = re.findall(r"'sha256-([^']+)'", POLICY)
    assert {hashlib.sha256(part).digest() for part in (script, style)} == {
        base64.b64decode(one) for one in digests
    }


def test_two_devices_that_compute_half_of_each_batch_are_as_busy_as_one() -> None:
    clock = Clock()
    half = Share(UP.n // 2, Layer(UP).streamed_bytes // 2, 100)
    devices = [
        MeasuredDevice(name=f"cuda:{i}", roofline=ROOFLINE, shares={UP.name: half}) for i in (0, 1)
    ]
    metrics = metrics_of(UP, clock=clock, devices=devices)
    history = History(metrics, clock)
    compute(metrics, UP.name, 4, launches=[("cuda:0", 500_000_000), ("cuda:1", 500_000_000)])
    clock.seconds += 5
    history.tick()
    found = now(metrics, history)
    assert found["machine"]["busy_ratio"] == 0.5 / 5
    assert found["trend"]["busy_ratio"] == [0.5 / 5]
    assert found["machine"]["peak_bytes_per_second"] == ROOFLINE.peak_bytes_per_second
    (shape,) = found["shapes"]
    assert shape["busy_ratio"] == 0.5 / 10
    (rows,) = shape["rows"]
    nbytes = Layer(UP).streamed_bytes + 4 * (2 * UP.k * 2 + UP.n * 4)
    assert rows["batches_per_second"] == 1 / 10
    assert rows["rows_per_second"] == 4 / 10
    assert rows["mean_seconds"] == 0.5
    assert rows["bytes_per_second"] == nbytes
    assert rows["products_per_second"] == 4 * UP.n * UP.k
    assert rows["products_per_byte"] == pytest.approx(4 * UP.n * UP.k / nbytes)
