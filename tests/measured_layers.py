"""Metrics for tests that need no real layers: made-up ones of chosen names, shapes and sizes."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from qlinear_service.cost import CostCurve, Steps
from qlinear_service.measured import Load, MeasuredDevice
from qlinear_service.metrics import Metrics
from qlinear_service.roofline import Roofline

GPU_GAUGES = {
    f"qlinear_gpu_{name}": 1.0
    for name in (
        *("clock_hertz", "memory_clock_hertz", "throttled"),
        *("power_watts", "temperature_celsius"),
    )
}
TELEMETRY = {
    **{(name,): value for name, value in GPU_GAUGES.items()},
    ("qlinear_gpu_throttle_reason", "power_cap"): 1.0,
    ("qlinear_gpu_memory_errors", "corrected"): 2.0,
}
"""What a GPU might say of itself."""


@dataclass(frozen=True)
class Spec:
    """A layer's shape; the model is "m" unless told otherwise."""

    module: str
    n: int
    k: int = 8
    model: str = "m"

    @property
    def name(self) -> str:
        return f"{self.model}/{self.module}"

    @property
    def shape(self) -> str:
        return f"k{self.k}_n{self.n}_b4_gcol"


@dataclass(frozen=True)
class Layer:
    """A layer as metrics see it."""

    spec: Spec

    @property
    def streamed_bytes(self) -> int:
        return self.spec.n * self.spec.k // 2 + 2 * self.spec.n

    @property
    def packed_bytes(self) -> int:
        return self.streamed_bytes + 4 * self.spec.n


def curves_of(*specs: Spec) -> dict[str, CostCurve]:
    """Return the same curve for the shape of each: 10 µs a row."""
    curve = CostCurve(steps=tuple(Steps(rows, 0.0, 1e-5 * rows, 0.0) for rows in (1, 8, 64)))
    return {spec.shape: curve for spec in specs}


def metrics_of(
    *specs: Spec,
    roofline: Roofline | None = None,
    waiting: Mapping[str, int] | None = None,
    clock: Callable[[], float] = time.monotonic,
    telemetry: Mapping[tuple[str, ...], float] | None = None,
    tuned: Iterable[tuple[str, int, float]] = (),
    curves: Mapping[str, CostCurve] | None = None,
    devices: Sequence[MeasuredDevice] = (),
) -> Metrics:
    """Return metrics that know these layers, and a queue with that many rows of each waiting."""
    metrics = Metrics(
        registry=CollectorRegistry(),
        version="1",
        device="cpu",
        state=lambda: "serving",
        clock=clock,
    )
    rows = waiting or {}
    load = Load(queue_rows=lambda: rows, inflight_bytes=lambda: 0, queue_limit_bytes=1 << 20)
    metrics.started(
        layers=map(Layer, specs),
        kernels="torch",
        load_seconds=0.5,
        load=load,
        curves=curves,
        devices=devices
        or [
            MeasuredDevice(
                name="cpu",
                roofline=roofline,
                telemetry=None if telemetry is None else lambda: telemetry,
                tuned_bandwidths=tuple(tuned),
            )
        ],
    )
    return metrics


ROOFLINE = Roofline(sizes_bytes=(100, 200), read_seconds=(1e-6, 4e-6), products_per_second=1e9)


def compute(
    metrics: Metrics,
    layer: str,
    rows: int,
    seconds: float = 1e-3,
    launches: Sequence[tuple[str, int]] = (),
    *,
    is_timed: bool = True,
) -> None:
    metrics.waited(layer, [2e-3])
    metrics.batch_finished(
        layer,
        rows=rows,
        requests=1,
        x_itemsize=2,
        y_itemsize=4,
        transfers=[("gather", 10_000)],
        kernel_seconds=seconds,
        is_timed=is_timed,
        launches=launches,
    )


def everything_of(*specs: Spec) -> Metrics:
    """Metrics that have all that is told once, at the start."""
    return metrics_of(
        *specs,
        roofline=ROOFLINE,
        waiting={"m/up": 3},
        telemetry=TELEMETRY,
        tuned=[(specs[0].shape, 8, 4e12)],
        curves=curves_of(*specs),
    )


def everything(metrics: Metrics) -> None:
    """Cause at least one series of every family; `metrics` knows layer m/up."""
    compute(metrics, "m/up", 3)
    metrics.slot_filled(1e-6)
    metrics.replied(1e-5)
    metrics.call_finished("MatMul", ["m/up"], "OK", 0.01)
    metrics.call_finished("MatMul", ["up"], "RESOURCE_EXHAUSTED", 0.01, reason="queue_rows")
    metrics.call_finished("MatMul", ["up"], "DEADLINE_EXCEEDED", 0.01)
    metrics.call_finished("MatMulStream", ["up"], "CANCELLED", 0.01)


def crowd() -> Iterator[Spec]:
    """200 layers of 6 shapes with names as long as real ones."""
    for number in range(200):
        yield Spec(f"model.layers.{number}.mlp.down_proj", n=1024 * (1 + number % 6), k=4096)


def busy_metrics(*devices: str) -> Metrics:
    """Metrics of the crowd after all that can happen to it has happened, on each device."""
    specs = list(crowd())
    waiting = {spec.name: 1 for spec in specs}
    known = [MeasuredDevice(name=name, roofline=ROOFLINE) for name in devices]
    metrics = metrics_of(
        *specs, roofline=ROOFLINE, waiting=waiting, curves=curves_of(*specs), devices=known
    )
    calls = itertools.product(specs, ("MatMul", "MatMulStream"), ("OK", "INVALID_ARGUMENT"))
    for spec, method, code in calls:
        metrics.call_finished(method, [spec.name], code, 0.001)
    for spec, rows in itertools.product(specs, (1, 8, 16, 32, 64, 128, 512, 1000)):
        compute(metrics, spec.name, rows, launches=[(name, 10_000) for name in devices])
    metrics.slot_filled(1e-6)
    metrics.replied(1e-6)
    for reason in ("queue_rows", "queue_bytes", "queue_age", "too_large", "not_serving", "other"):
        metrics.call_finished("MatMul", ["x"], "RESOURCE_EXHAUSTED", 0.0, reason=reason)
    for code in ("NOT_FOUND", "DEADLINE_EXCEEDED", "CANCELLED"):
        metrics.call_finished("MatMul", ["x"], code, 0.0)
    return metrics


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(text: str) -> Samples:
    """Return the values of an exposition by name and labels, as Prometheus's parser reads them."""
    families = text_string_to_metric_families(text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def scrape(metrics: Metrics) -> Samples:
    """Return what a scrape shows now."""
    return samples_of(generate_latest(metrics.registry).decode())


def value(samples: Samples, name: str, **labels: str) -> float:
    """Return one value, 0 if the series does not exist."""
    return samples.get((name, frozenset(labels.items())), 0.0)


def names(samples: Iterable[tuple[str, frozenset[tuple[str, str]]]]) -> set[str]:
    """Return the names of all samples."""
    return {name for name, _ in samples}
