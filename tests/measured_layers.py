"""Metrics for tests that need no real layers: made-up ones of chosen names, shapes and sizes."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from qlinear_service.cost import TILE_EDGES, CostCurve, Steps
from qlinear_service.measured import Load
from qlinear_service.metrics import Metrics
from qlinear_service.roofline import Roofline

GPU_GAUGES = {
    f"qlinear_gpu_{name}": 1.0
    for name in ("clock_hertz", "throttled", "power_watts", "temperature_celsius")
}
"""What a GPU might say of itself."""


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
    "qlinear_sweet_spot_rows": ("gauge", {"shape", "device"}),
    "qlinear_tuned_bandwidth_bytes_per_second": ("gauge", {"shape", "m", "device"}),
    "qlinear_load_seconds": ("gauge", set()),
    "qlinear_ready": ("gauge", set()),
    "qlinear_build_info": ("gauge", {"version", "device", "kernels"}),
}


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
    curve = CostCurve(steps=tuple(Steps(rows, 0.0, 1e-5 * rows, 0.0) for rows in TILE_EDGES))
    return {spec.shape: curve for spec in specs}


def metrics_of(
    *specs: Spec,
    roofline: Roofline | None = None,
    waiting: Mapping[str, int] | None = None,
    clock: Callable[[], float] = time.monotonic,
    gauges: Mapping[str, float] | None = None,
    curves: Mapping[str, CostCurve] | None = None,
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
        roofline=roofline,
        load=load,
        curves=curves,
        gauges=None if gauges is None else lambda: gauges,
    )
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
