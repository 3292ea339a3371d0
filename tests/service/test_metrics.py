"""What metrics count, exactly, and that no traffic can make them many."""

import re
from pathlib import Path

import pytest
from measured_layers import (
    GPU_GAUGES,
    ROOFLINE,
    Layer,
    Spec,
    compute,
    curves_of,
    everything,
    everything_of,
    metrics_of,
    names,
    scrape,
    value,
)
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from qlinear_service.measured import MeasuredDevice, Share
from qlinear_service.metric_families import m_label, new_families, quantile

UP, DOWN, TWIN = Spec("up", n=16), Spec("down", n=32), Spec("up", n=16, model="other")

# Section 7 of the design: name -> type and labels.
CONTRACT = {
    "qlinear_requests_total": ("counter", {"method", "layer", "code"}),
    "qlinear_request_seconds": ("histogram", {"method", "shape"}),
    "qlinear_queue_seconds": ("histogram", {"shape"}),
    "qlinear_transfer_seconds": ("histogram", {"direction"}),
    "qlinear_reply_seconds": ("histogram", set()),
    "qlinear_kernel_seconds": ("histogram", {"shape", "m", "device"}),
    "qlinear_kernel_bytes_total": ("counter", {"shape", "m", "device"}),
    "qlinear_kernel_busy_seconds_total": ("counter", {"shape", "m", "device"}),
    "qlinear_hbm_bandwidth_bytes_per_second": ("gauge", {"shape", "m", "device"}),
    "qlinear_hbm_peak_bytes_per_second": ("gauge", {"device"}),
    "qlinear_roofline_ratio": ("gauge", {"shape", "m", "device"}),
    "qlinear_tuned_bandwidth_bytes_per_second": ("gauge", {"shape", "m", "device"}),
    "qlinear_batch_rows": ("histogram", {"shape"}),
    "qlinear_batch_requests": ("histogram", {"shape"}),
    "qlinear_queue_rows": ("gauge", {"layer"}),
    "qlinear_inflight_bytes": ("gauge", set()),
    "qlinear_rejected_total": ("counter", {"reason"}),
    "qlinear_expired_total": ("counter", set()),
    "qlinear_cancelled_total": ("counter", set()),
    "qlinear_queue_limit_bytes": ("gauge", set()),
    "qlinear_layers_loaded": ("gauge", set()),
    "qlinear_weight_bytes": ("gauge", {"device"}),
    **{name: ("gauge", {"device"}) for name in GPU_GAUGES},
    # Beyond the contract: what explains a slow day.
    "qlinear_gpu_throttle_reason": ("gauge", {"device", "reason"}),
    "qlinear_gpu_memory_errors": ("gauge", {"device", "kind"}),
    "qlinear_load_seconds": ("gauge", set()),
    "qlinear_ready": ("gauge", set()),
    "qlinear_build_info": ("gauge", {"version", "device", "kernels"}),
    "qlinear_sweet_spot_rows": ("gauge", {"shape", "device"}),
}


def test_every_metric_of_the_contract_has_its_type_and_labels() -> None:
    metrics = everything_of(UP)
    everything(metrics)
    text = generate_latest(metrics.registry).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        suffix = "_total" if family.type == "counter" else ""
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        found[family.name + suffix] = (family.type, labels)
        assert len(family.documentation) > 20, family.name
    assert found == CONTRACT
    assert "_created" not in text
    for family in new_families().values():
        assert len(family.bounds) + 1 <= 10, family.name
        assert list(family.bounds) == sorted(set(family.bounds))


def test_the_documentation_names_every_metric() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    table = text.partition("## All of them")[2].partition("## Questions")[0]
    listed = {f"qlinear_{name}" for row in table.splitlines() for name in first_cell(row)}
    assert listed == set(CONTRACT)
    for query in re.findall(r"qlinear_\w+", text):
        family = re.sub("_(bucket|sum|count)$", "", query)
        assert family in CONTRACT or family == "qlinear_", query


def first_cell(row: str) -> list[str]:
    """Return the names in the first cell of a table's row; the heading has none."""
    return re.findall(r"`(\w+)`", row.split("|")[1]) if row.startswith("| `") else []


def test_openmetrics_parses_too() -> None:
    metrics = everything_of(UP)
    everything(metrics)
    text = generate_openmetrics(metrics.registry).decode()
    assert "_created" not in text
    assert len(list(parse_openmetrics(text))) == len(CONTRACT)


def test_series_appear_at_their_first_use() -> None:
    samples = scrape(metrics_of(UP))
    assert names(samples) == {
        *("qlinear_queue_limit_bytes", "qlinear_inflight_bytes", "qlinear_layers_loaded"),
        *("qlinear_weight_bytes", "qlinear_load_seconds", "qlinear_ready", "qlinear_build_info"),
    }
    assert value(samples, "qlinear_weight_bytes", device="cpu") == Layer(UP).packed_bytes
    assert value(samples, "qlinear_build_info", version="1", device="cpu", kernels="torch") == 1


def test_tuned_bandwidths_stand_under_the_labels_of_batches() -> None:
    tuned = [("a", 256, 3.0), ("a", 16, 1.0), ("a", 512, 4.0), ("b", 1, 5.0)]
    samples = scrape(metrics_of(UP, tuned=tuned))
    name = "qlinear_tuned_bandwidth_bytes_per_second"
    found = {(s, m): value(samples, name, shape=s, m=m, device="cpu")
             for s, m in (("a", "16"), ("a", "512"), ("b", "1"))}  # fmt: skip
    # 256 and 512 rows have one label: the larger speaks.
    assert found == {("a", "16"): 1.0, ("a", "512"): 4.0, ("b", "1"): 5.0}
    assert sum(sample == name for sample, _ in samples) == 3


def test_a_call_counts_once_per_layer_and_its_time_once() -> None:
    metrics = metrics_of(UP, DOWN)
    metrics.call_finished("MatMul", ["m/up", "down", "m/up"], "OK", 0.002)
    metrics.call_finished("MatMul", ["down"], "INTERNAL", 9.0)
    metrics.call_finished("ListLayers", [], "OK", 9.0)
    samples = scrape(metrics)

    def calls(**labels: str) -> float:
        return value(samples, "qlinear_requests_total", **labels)

    assert calls(method="MatMul", layer="m/up", code="OK") == 2
    assert calls(method="MatMul", layer="m/down", code="OK") == 1
    assert calls(method="MatMul", layer="m/down", code="INTERNAL") == 1
    assert calls(method="ListLayers", layer="none", code="OK") == 1
    first = {"method": "MatMul", "shape": UP.shape}
    assert value(samples, "qlinear_request_seconds_count", **first) == 1
    assert value(samples, "qlinear_request_seconds_sum", **first) == 0.002
    assert value(samples, "qlinear_request_seconds_bucket", le="0.001", **first) == 0
    assert value(samples, "qlinear_request_seconds_bucket", le="0.003", **first) == 1
    assert sum(name == "qlinear_request_seconds_count" for name, _ in samples) == 1


def test_a_bare_name_of_two_models_is_nobodys() -> None:
    metrics = metrics_of(UP, TWIN)
    for name in ("up", "other/up", "none", "unknown"):
        metrics.call_finished("MatMul", [name], "NOT_FOUND", 0.0)
    samples = scrape(metrics)
    labels = {"method": "MatMul", "code": "NOT_FOUND"}
    assert value(samples, "qlinear_requests_total", layer="unknown", **labels) == 3
    assert value(samples, "qlinear_requests_total", layer="other/up", **labels) == 1


def test_ends_of_calls_are_told_apart() -> None:
    metrics = metrics_of(UP)
    for reason in ("queue_rows", "queue_rows", "too_large"):
        metrics.call_finished("MatMul", ["up"], "RESOURCE_EXHAUSTED", 0.0, reason=reason)
    metrics.call_finished("MatMul", ["up"], "DEADLINE_EXCEEDED", 0.0)
    metrics.call_finished("MatMul", ["up"], "CANCELLED", 0.0)
    samples = scrape(metrics)
    assert value(samples, "qlinear_rejected_total", reason="queue_rows") == 2
    assert value(samples, "qlinear_rejected_total", reason="too_large") == 1
    assert value(samples, "qlinear_expired_total") == 1
    assert value(samples, "qlinear_cancelled_total") == 1


def test_bytes_and_seconds_of_computations_are_exact() -> None:
    metrics = metrics_of(UP)
    for rows in (1, 9, 16):
        compute(metrics, "m/up", rows, seconds=0.25)
    samples = scrape(metrics)
    labels = {"shape": UP.shape, "m": "16", "device": "cpu"}
    # Two batches, 25 rows: weights twice; rows of 8 float16 in and 16 float32 out.
    expected = 2 * (16 * 8 // 2 + 2 * 16) + 25 * (8 * 2 + 16 * 4)
    assert value(samples, "qlinear_kernel_bytes_total", **labels) == expected
    assert value(samples, "qlinear_kernel_busy_seconds_total", **labels) == 0.5
    assert value(samples, "qlinear_kernel_seconds_count", **labels) == 2
    rate = value(samples, "qlinear_hbm_bandwidth_bytes_per_second", **labels)
    assert rate == expected / 0.5
    assert value(samples, "qlinear_batch_rows_sum", shape=UP.shape) == 26
    assert value(samples, "qlinear_batch_requests_count", shape=UP.shape) == 3
    assert value(samples, "qlinear_queue_seconds_sum", shape=UP.shape) == pytest.approx(6e-3)


def test_the_window_forgets_after_ten_seconds() -> None:
    now = 100.5
    metrics = metrics_of(UP, roofline=ROOFLINE, clock=lambda: now)
    compute(metrics, "m/up", 1, seconds=0.5)
    (first,) = metrics.live()
    now = 109.9
    compute(metrics, "m/up", 1, seconds=1.5)
    (both,) = metrics.live()
    assert (both.launches, both.rows, both.busy_seconds) == (2, 2, 2.0)
    assert both.floor_seconds == pytest.approx(2 * first.floor_seconds)
    now = 110.0
    (last,) = metrics.live()
    assert (last.launches, last.busy_seconds) == (1, 1.5)
    now = 119.99
    assert metrics.live() == []
    assert "qlinear_roofline_ratio" not in names(scrape(metrics))
    compute(metrics, "m/up", 1, seconds=0.25)
    assert metrics.live()[0].bytes_per_second == (16 * 6 + 80) / 0.25


def test_the_roofline_is_the_slower_of_reading_and_multiplying() -> None:
    assert ROOFLINE.peak_bytes_per_second == pytest.approx(1e8)
    assert ROOFLINE.read_floor_seconds(50) == pytest.approx(0.5e-6)
    assert ROOFLINE.read_floor_seconds(100) == pytest.approx(1e-6)
    assert ROOFLINE.read_floor_seconds(150) == pytest.approx(2.5e-6)
    assert ROOFLINE.read_floor_seconds(400) == pytest.approx(8e-6)
    assert ROOFLINE.floor_seconds(100, 999) == pytest.approx(1e-6)
    assert ROOFLINE.floor_seconds(100, 5000) == pytest.approx(5e-6)
    metrics = metrics_of(UP, roofline=ROOFLINE)
    compute(metrics, "m/up", 1, seconds=1e-5)
    ratio = value(scrape(metrics), "qlinear_roofline_ratio", shape=UP.shape, m="1", device="cpu")
    assert ratio == pytest.approx(ROOFLINE.read_floor_seconds(16 * 6 + 80) / 1e-5)


def test_m_labels_are_upper_bounds() -> None:
    expected = {1: "1", 2: "8", 8: "8", 9: "16", 33: "64", 128: "128", 129: "512", 513: "inf"}
    assert {rows: m_label(rows) for rows in expected} == expected


def test_quantiles_are_those_of_prometheus() -> None:
    assert quantile((1.0, 2.0), [0, 0, 0], 0.5) is None
    assert quantile((1.0, 2.0), [0, 10, 0], 0.5) == 1.5
    assert quantile((1.0, 2.0), [10, 0, 0], 0.5) == 0.5
    assert quantile((1.0, 2.0), [1, 0, 9], 0.99) == 2.0


def test_a_batch_on_several_devices_is_a_launch_on_each_and_one_batch() -> None:
    """The bytes of each are those of its share, and of the rows that both of them read."""
    now = 100.0
    layer = Layer(UP)
    shares = [Share(n, layer.streamed_bytes * n // UP.n, 7 * n) for n in (12, 4)]
    labels_of = ("cuda:0", "cuda:1")
    metrics = metrics_of(
        UP,
        clock=lambda: now,
        curves=curves_of(UP),
        devices=[
            MeasuredDevice(name=name, roofline=ROOFLINE, shares={UP.name: share})
            for name, share in zip(labels_of, shares, strict=True)
        ],
    )
    compute(metrics, UP.name, 3, launches=[("cuda:0", 3000), ("cuda:1", 1000)])
    samples = scrape(metrics)
    for name, share, seconds in zip(labels_of, shares, (3e-6, 1e-6), strict=True):
        labels = {"shape": UP.shape, "m": "8", "device": name}
        nbytes = share.streamed_bytes + 3 * (UP.k * 2 + share.n * 4)
        assert value(samples, "qlinear_kernel_bytes_total", **labels) == nbytes
        assert value(samples, "qlinear_kernel_busy_seconds_total", **labels) == seconds
        assert value(samples, "qlinear_kernel_seconds_count", **labels) == 1
        gauge = value(samples, "qlinear_hbm_bandwidth_bytes_per_second", **labels)
        assert gauge == pytest.approx(nbytes / seconds)
        floor = ROOFLINE.floor_seconds(nbytes, 3 * UP.k * share.n)
        ratio = value(samples, "qlinear_roofline_ratio", **labels)
        assert ratio == pytest.approx(floor / seconds)
        assert value(samples, "qlinear_weight_bytes", device=name) == share.packed_bytes
        spot = {"shape": UP.shape, "device": name}
        assert value(samples, "qlinear_sweet_spot_rows", **spot) == 1
    assert value(samples, "qlinear_batch_rows_count", shape=UP.shape) == 1
    (live,) = metrics.live()
    assert (live.launches, live.batches, live.rows) == (2, 1.0, 3.0)
    assert live.busy_seconds == pytest.approx(4e-6)
    assert metrics.devices_of(UP.name) == "cuda:0,cuda:1"


def test_a_device_that_holds_nothing_of_a_layer_is_not_among_its_devices() -> None:
    one = MeasuredDevice(name="cuda:0", shares={})
    other = MeasuredDevice(name="cuda:1", shares={UP.name: Share(UP.n, 100, 200)})
    metrics = metrics_of(UP, devices=[one, other])
    assert metrics.devices_of(UP.name) == "cuda:1"
    assert value(scrape(metrics), "qlinear_weight_bytes", device="cuda:0") == 0
    assert metrics_of(UP).devices_of(UP.name) == "cpu"
