"""Makes the document: the metrics of now and of the last ten seconds, as JSON.

Bounded whatever is loaded: so many shapes, so many layers, names of so many characters.
"""

import json
import math

from qlinear_service.bandwidth import Live
from qlinear_service.metrics import Metrics
from qlinear_service.watch.answers import answers, notes
from qlinear_service.watch.calls import calls_now, time_of_call
from qlinear_service.watch.document import FORMAT, Facts, Layer, Machine, Now, Queue
from qlinear_service.watch.history import History
from qlinear_service.watch.shapes import shapes_now
from qlinear_service.watch.units import short_name
from qlinear_service.watch.window import Window

__all__ = ["MOST_LAYERS", "now", "to_json"]

MOST_SHAPES = 64
MOST_LAYERS = 400
MOST_NAME = 160
"""Characters of a name."""

GAUGE = "qlinear_gpu_"


def now(metrics: Metrics, history: History) -> Now:
    """Return what a server does now; from any thread."""
    window = history.window()
    live = metrics.live()
    shapes, left_out = shapes_now(metrics, window, live, most=MOST_SHAPES)
    facts = Facts(
        format=FORMAT,
        version=metrics.version,
        device=metrics.device,
        kernels=_kernels(metrics),
        state=metrics.state(),
        uptime_seconds=history.uptime_seconds(),
        window_seconds=window.seconds,
        calls=calls_now(window),
        time=time_of_call(window),
        queue=_queue(metrics, window),
        machine=_machine(metrics, window, live),
        shapes=shapes,
        shapes_left_out=left_out,
        layers=_layers(metrics, window),
        layers_total=len(metrics.layers),
        packed_bytes=sum(layer.packed_bytes for layer in metrics.layers.values()),
        trend=history.trend(),
    )
    return {**facts, "answers": answers(facts), "notes": notes(facts)}


def to_json(document: Now) -> bytes:
    """Return the document as UTF-8; times are cut to six digits."""
    return json.dumps(_rounded(document), ensure_ascii=False, separators=(",", ":")).encode(
        errors="replace"  # a name may hold half a character
    )


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def _kernels(metrics: Metrics) -> str:
    families = metrics.families["qlinear_build_info"]
    return next((labels[2] for labels in list(families.numbers)), "")


def _queue(metrics: Metrics, window: Window) -> Queue:
    load = metrics.load
    return Queue(
        rows=0 if load is None else sum(load.queue_rows().values()),
        bytes=0 if load is None else load.inflight_bytes(),
        limit_bytes=0 if load is None else load.queue_limit_bytes,
        rejected_per_second=window.rates("qlinear_rejected_total", "reason"),
        expired_per_second=window.rate("qlinear_expired_total"),
        cancelled_per_second=window.rate("qlinear_cancelled_total"),
    )


def _machine(metrics: Metrics, window: Window, live: list[Live]) -> Machine:
    busy = sum(one.busy_seconds for one in live)
    floor = sum(one.floor_seconds for one in live)
    devices = metrics.devices
    roofline = devices[0].roofline if devices else None  # several are of one kind
    large = None if roofline is None else roofline.sizes_bytes[-1] / roofline.read_seconds[-1]
    return Machine(
        busy_ratio=window.rate("qlinear_kernel_busy_seconds_total") / max(1, len(devices)),
        bytes_per_second=sum(one.nbytes for one in live) / busy if busy else None,
        roofline_ratio=floor / busy if floor else None,
        peak_bytes_per_second=None if roofline is None else roofline.peak_bytes_per_second,
        large_bytes_per_second=large,
        peak_products_per_second=None if roofline is None else roofline.products_per_second,
        gauges=_gauges(metrics),
    )


def _gauges(metrics: Metrics) -> dict[str, float]:
    """Return what a GPU says of itself now; of several series of a name, the largest."""
    return {
        name.removeprefix(GAUGE): max(value for _, value in series)
        for name, series in metrics.pulled().items()
        if name.startswith(GAUGE) and series
    }


def _layers(metrics: Metrics, window: Window) -> list[Layer]:
    calls = window.rates("qlinear_requests_total", "layer")
    waiting = {} if metrics.load is None else metrics.load.queue_rows()

    def asked_for(item: tuple[str, object]) -> float:
        return calls.get(item[0], 0.0) + waiting.get(item[0], 0)

    # Sorting is stable: those with calls first, all in the order of the model.
    chosen = sorted(metrics.layers.items(), key=asked_for, reverse=True)[:MOST_LAYERS]
    most = {name for name, _ in chosen}
    ordered = [item for item in metrics.layers.items() if item[0] in most]
    ordered.sort(key=lambda item: not asked_for(item))
    return [
        Layer(
            name=short_name(name, MOST_NAME),
            shape=layer.spec.shape,
            packed_bytes=layer.packed_bytes,
            rows_waiting=waiting.get(name, 0),
            calls_per_second=calls.get(name, 0.0),
        )
        for name, layer in ordered
    ]
