"""What happened, counted: the one object that every stage tells, and that a scrape reads.

Told on the event loop only, at the borders of stages, never per row. Layers that are not loaded
all count as "unknown", so whatever clients ask for, the series stay bounded. Metrics themselves
are declared in `metric_families.py`; docs/metrics.md explains them to operators.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from qlinear_service.bandwidth import Batches, Launches, Live, together
from qlinear_service.cost import CostCurve
from qlinear_service.measured import Load, MeasuredDevice, MeasuredLayer
from qlinear_service.metric_calls import CallSeries
from qlinear_service.metric_families import Histogram, m_label, new_families

__all__ = ["Metrics"]

MOST_LAYERS = 1024
"""A call that fails may have named millions: it is counted for so many of them."""


class Metrics(Collector):
    """Counts and shows.

    Args:
        registry: where scrapes look; one for each server.
        version: of this package.
        device: what computes, e.g. "cpu"; of several devices the names.
        state: what the server is doing: "starting", "serving" or "draining".
        clock: seconds.
    """

    def __init__(
        self,
        *,
        registry: CollectorRegistry,
        version: str,
        device: str,
        state: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.version = version
        self.device = device
        self.state = state
        self.layers: dict[str, MeasuredLayer] = {}
        """The loaded layers by full name."""
        self.families = new_families()
        """All metrics by name, with their series."""
        # Looked up once, as these are told of every call.
        self._calls = CallSeries(self.families)
        self._copies: dict[str, Histogram] = {}
        self._slots = self._copy("slot")
        self._replies = self.families["qlinear_reply_seconds"].histogram()
        self._waits: dict[str, Histogram] = {}
        self._batches: dict[str, Batches] = {}
        self.devices: tuple[MeasuredDevice, ...] = ()
        """What computes, once that is known."""
        self.launches: dict[str, Launches] = {}
        """By the name of the device."""
        self._clock = clock
        self.curves: Mapping[str, CostCurve] = {}
        """What batches cost, by shape, where that was measured."""
        self.load: Load | None = None
        """Where to ask for queue and slab, once there are any."""
        registry.register(self)

    def started(
        self,
        *,
        layers: Iterable[MeasuredLayer],
        kernels: str,
        load_seconds: float,
        devices: Sequence[MeasuredDevice],
        load: Load,
        curves: Mapping[str, CostCurve] | None = None,
    ) -> None:
        """Learn what is served, once, when it is loaded.

        Args:
            layers: the loaded ones.
            kernels: the name of what multiplies.
            load_seconds: from the start of loading on.
            devices: what computes, and what is known of each.
            load: where queue and slab tell how full they are.
            curves: what batches cost, by shape, where that was measured.
        """
        loaded = {layer.spec.name: layer for layer in layers}
        self._calls.know(loaded)
        self.layers, self.load, self.curves = loaded, load, curves or {}
        self.devices = tuple(devices)
        self._set("qlinear_layers_loaded", len(loaded))
        self._set("qlinear_load_seconds", load_seconds)
        self._set("qlinear_queue_limit_bytes", load.queue_limit_bytes)
        self._set("qlinear_build_info", 1, self.version, self.device, kernels)
        for device in self.devices:
            self._start_device(device)

    def _start_device(self, device: MeasuredDevice) -> None:
        name, roofline = device.name, device.roofline
        self.launches[name] = Launches(
            self.families, device=name, clock=self._clock, roofline=roofline
        )
        packed = 0
        for layer in self.layers.values():
            share = device.share_of(layer)
            curve = self.curves.get(layer.spec.shape)
            packed += 0 if share is None else share.packed_bytes
            if share is not None and curve is not None:
                rows = curve.sweet_spot_rows
                self._set("qlinear_sweet_spot_rows", rows, layer.spec.shape, name)
        self._set("qlinear_weight_bytes", packed, name)
        if roofline is not None:
            peak = roofline.peak_bytes_per_second
            self._set("qlinear_hbm_peak_bytes_per_second", peak, name)
        # Of several measured row counts under one label the largest is the last.
        for shape, m, rate in sorted(device.tuned_bandwidths):
            self._set("qlinear_tuned_bandwidth_bytes_per_second", rate, shape, m_label(m), name)

    def call_finished(
        self,
        method: str,
        layers: Sequence[str],
        code: str,
        seconds: float,
        *,
        reason: str = "",
        trace_id: str = "",
    ) -> None:
        """Count one call, unary or of a stream, when its reply is ready.

        Args:
            method: e.g. "MatMulStream".
            layers: the names that it asked for, as it wrote them; none for other methods.
            code: the name of its status, e.g. "OK".
            seconds: from its arrival to its reply.
            reason: `RequestError.reason` of what refused it.
            trace_id: of the trace that shows it, if one does.
        """
        if code == "OK" and len(layers) == 1:  # nearly all of them
            calls = self._calls
            answer = calls.answers.get((method, layers[0])) or calls.answer(method, layers[0])
            answer[0].value += 1
            answer[1].observe(seconds, trace_id)
            return
        for name in layers[:MOST_LAYERS] if code != "OK" else layers:
            self._calls.number(method, name, code).value += 1
        if not layers:
            self._calls.number(method, None, code).value += 1
        elif code == "OK":
            self._calls.answer(method, layers[0])[1].observe(seconds, trace_id)
        if reason:
            self.families["qlinear_rejected_total"].number(reason).value += 1
        if code == "DEADLINE_EXCEEDED":
            self.families["qlinear_expired_total"].number().value += 1
        elif code == "CANCELLED":
            self.families["qlinear_cancelled_total"].number().value += 1

    def slot_filled(self, seconds: float) -> None:
        """Count the copy of one call's activations into its slot."""
        self._slots.observe(seconds)

    def replied(self, seconds: float) -> None:
        """Count the time from a call's results to its encoded reply."""
        self._replies.observe(seconds)

    def waited(self, layer: str, seconds: Sequence[float]) -> None:
        """Count how long each call of a batch waited for it.

        Args:
            layer: the full name.
            seconds: one for each call whose first rows run now.
        """
        histogram = self._waits.get(layer)
        if histogram is None:
            shape = self.layers[layer].spec.shape
            histogram = self.families["qlinear_queue_seconds"].histogram(shape)
            self._waits[layer] = histogram
        histogram.observe_all(seconds)

    def batch_finished(
        self,
        layer: str,
        *,
        rows: int,
        requests: int,
        x_itemsize: int,
        y_itemsize: int,
        transfers: Iterable[tuple[str, int]],
        kernel_seconds: float,
        is_timed: bool = True,
        launches: Sequence[tuple[str, int]] = (),
    ) -> None:
        """Count one computation that succeeded.

        Args:
            layer: the full name.
            rows: of the batch.
            requests: calls that shared it.
            x_itemsize: bytes of one element of x.
            y_itemsize: bytes of one element of y.
            transfers: copies on the way: the direction and the nanoseconds of each.
            kernel_seconds: the computation itself.
            is_timed: it was measured; else they are those of another one of this layer, and the
                histogram of seconds has none of it.
            launches: where there are several devices, those that took part in it, and the
                nanoseconds of each.
        """
        batches = self._batches.get(layer)
        if batches is None:
            batches = Batches.of(self.layers[layer], self.devices, self.families)
            self._batches[layer] = batches
        for direction, nanoseconds in transfers:
            (self._copies.get(direction) or self._copy(direction)).observe(nanoseconds / 1e9)
        batches.rows.observe(rows)
        batches.requests.observe(requests)
        took = [(device, nanoseconds / 1e9) for device, nanoseconds in launches]
        if not took:
            took = [(self.devices[0].name, kernel_seconds)]
        for device, seconds in took:
            share = batches.shares[device]
            row_bytes = batches.k * x_itemsize + share.n * y_itemsize
            self.launches[device].add(
                batches.shape,
                m_label(rows),
                rows=rows,
                nbytes=share.streamed_bytes + rows * row_bytes,
                products=rows * batches.k * share.n,
                seconds=seconds,
                is_timed=is_timed,
                share=share.n / batches.n,
            )

    def live(self) -> list[Live]:
        """Return what all devices did in the last 10 s by shape and m, busiest first."""
        return together(one for some in self.launches.values() for one in some.live())

    def devices_of(self, layer: str) -> str:
        """Return the names of the devices that hold something of a layer, by its full name."""
        measured = self.layers[layer]
        return ",".join(one.name for one in self.devices if one.share_of(measured) is not None)

    def describe(self) -> Iterator[Metric]:
        """Name the families without looking at what they hold."""
        return (family.collect() for family in new_families().values())

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have series; any thread may call this."""
        pulled = self.pulled()
        for name, family in self.families.items():
            metric = family.collect(pulled.get(name, ()))
            if metric.samples:
                yield metric
                time.sleep(0)  # lets the event loop have the interpreter between two families

    def pulled(self) -> dict[str, list[tuple[tuple[str, ...], float]]]:
        """Return the gauges that are looked up at a scrape and counted nowhere."""
        live = [(name, one) for name, some in self.launches.items() for one in some.live()]
        pulled: dict[str, list[tuple[tuple[str, ...], float]]] = {
            "qlinear_ready": [((), float(self.state() == "serving"))],
            "qlinear_hbm_bandwidth_bytes_per_second": [
                ((one.shape, one.m, name), one.bytes_per_second) for name, one in live
            ],
            "qlinear_roofline_ratio": [
                ((one.shape, one.m, name), one.roofline_ratio)
                for name, one in live
                if one.roofline_ratio is not None
            ],
        }
        if self.load is not None:
            rows = self.load.queue_rows()
            pulled["qlinear_queue_rows"] = [((name,), float(n)) for name, n in rows.items()]
            pulled["qlinear_inflight_bytes"] = [((), float(self.load.inflight_bytes()))]
        for device in self.devices:
            told = {} if device.telemetry is None else device.telemetry()
            for (name, *labels), number in told.items():
                pulled.setdefault(name, []).append(((device.name, *labels), number))
        return pulled

    def _set(self, name: str, value: float, *labels: str) -> None:
        self.families[name].number(*labels).value = value

    def _copy(self, direction: str) -> Histogram:
        histogram = self.families["qlinear_transfer_seconds"].histogram(direction)
        self._copies[direction] = histogram
        return histogram
