"""What no traffic can make many: the lines of the exposition; and exemplars, which add none."""

import pytest
from measured_layers import (
    Spec,
    busy_metrics,
    metrics_of,
    samples_of,
    scrape,
    value,
)
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from qlinear_service.metrics import Metrics
from qlinear_service.tracing import kept_trace_id

UP = Spec("up", n=16)
FIRST, SECOND = "a" * 32, "b" * 32


def test_the_exposition_stays_under_3000_lines() -> None:
    metrics = busy_metrics()
    before = generate_latest(metrics.registry).decode()
    for number in range(10_000):
        name = f"unknown.{number}" if number % 2 else f"m/{number}\n\"'\\"
        metrics.call_finished("MatMul", [name], "NOT_FOUND", 0.001)
    after = generate_latest(metrics.registry).decode()
    assert len(after.splitlines()) == len(before.splitlines()) < 3000
    # Not even inside: what is remembered for speed is remembered for loaded layers only.
    assert len(metrics._calls.numbers) == 200 * 2 * 2
    assert set(samples_of(before)) == set(samples_of(after))


def test_each_further_device_adds_some_hundred_lines() -> None:
    one, four = busy_metrics("cuda:0"), busy_metrics(*(f"cuda:{i}" for i in range(4)))
    lines = [len(generate_latest(metrics.registry).splitlines()) for metrics in (one, four)]
    assert 500 < (lines[1] - lines[0]) / 3 < 900


def test_a_failed_call_of_many_names_is_no_burden() -> None:
    (metrics := metrics_of(UP)).call_finished("MatMul", ["x"] * 1_000_000, "NOT_FOUND", 0.0)
    labels = {"method": "MatMul", "layer": "unknown", "code": "NOT_FOUND"}
    assert value(scrape(metrics), "qlinear_requests_total", **labels) == 1024


def exemplars(metrics: Metrics) -> dict[str, tuple[str, float]]:
    """Trace id and value of each exemplar by the bound of its bucket."""
    text = generate_openmetrics(metrics.registry).decode()
    found = {}
    for family in parse_openmetrics(text):
        for sample in family.samples:
            if sample.exemplar is not None:
                assert sample.name == "qlinear_request_seconds_bucket"
                assert float(sample.exemplar.timestamp) > 1e9
                (trace_id,) = sample.exemplar.labels.values()
                found[sample.labels["le"]] = trace_id, sample.exemplar.value
    return found


def test_exemplars_name_the_last_trace_of_each_bucket() -> None:
    metrics = metrics_of(UP)
    metrics.call_finished("MatMul", ["up"], "OK", 0.02)
    assert exemplars(metrics) == {}
    for seconds, trace_id in ((0.02, FIRST), (0.025, SECOND), (0.026, ""), (7.0, FIRST)):
        metrics.call_finished("MatMul", ["up"], "OK", seconds, trace_id=trace_id)
    # What failed is not among the answers, nor is its trace.
    metrics.call_finished("MatMul", ["up"], "INTERNAL", 0.002, trace_id=SECOND)
    assert exemplars(metrics) == {"0.03": (SECOND, 0.025), "+Inf": (FIRST, 7.0)}
    samples = scrape(metrics)  # Prometheus's own text format has none
    labels = {"method": "MatMul", "shape": UP.shape}
    assert value(samples, "qlinear_request_seconds_count", **labels) == 5
    assert FIRST not in generate_latest(metrics.registry).decode()


@pytest.mark.parametrize(("flags", "kept"), [("01", FIRST), ("03", FIRST), ("00", ""), ("02", "")])
def test_only_traces_that_are_kept_have_an_id(flags: str, kept: str) -> None:
    assert kept_trace_id(f"00-{FIRST}-{'c' * 16}-{flags}") == kept
    assert kept_trace_id(None) == ""
