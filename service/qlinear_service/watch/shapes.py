"""What layers of each shape do: times of calls, rows of batches, bandwidth, roofline."""

from collections import Counter
from collections.abc import Iterable

from qlinear_service.bandwidth import WINDOW_SECONDS, Live
from qlinear_service.metrics import Metrics
from qlinear_service.watch.document import Rows, Shape
from qlinear_service.watch.window import Sums, Window

__all__ = ["shapes_now"]


def shapes_now(
    metrics: Metrics, window: Window, live: Iterable[Live], *, most: int
) -> tuple[list[Shape], int]:
    """Return the shapes of all loaded layers, the busiest first, and how many were left out.

    Args:
        metrics: of the server.
        window: the last seconds.
        live: what each shape and m computed in them.
        most: shapes at most.
    """
    layers: Counter[str] = Counter()
    packed: Counter[str] = Counter()
    products: dict[str, int] = {}
    for layer in metrics.layers.values():
        spec = layer.spec
        layers[spec.shape] += 1
        packed[spec.shape] += layer.packed_bytes
        products[spec.shape] = spec.n * spec.k
    batches: dict[str, list[Live]] = {}
    for one in live:
        batches.setdefault(one.shape, []).append(one)
    shapes = _Shapes(metrics, window)
    found = [
        shapes.shape(name, layers[name], packed[name], products[name], batches.get(name, []))
        for name in layers
    ]
    # Tenths of the time only, so that the order does not change at every look.
    found.sort(key=lambda one: (-round(one["busy_ratio"], 1), not one["busy_ratio"], one["shape"]))
    return found[:most], max(len(found) - most, 0)


class _Shapes:
    """The metrics by shape, looked up once."""

    def __init__(self, metrics: Metrics, window: Window) -> None:
        self._metrics = metrics
        self._devices = [device.name for device in metrics.devices]
        self._device_seconds = WINDOW_SECONDS * max(1, len(self._devices))
        self._seconds = window.seconds
        self._calls = window.sums("qlinear_request_seconds", "shape")
        self._queue = window.sums("qlinear_queue_seconds", "shape")
        self._kernel = window.sums("qlinear_kernel_seconds", "shape")
        self._rows = window.sums("qlinear_batch_rows", "shape")
        self._together = window.sums("qlinear_batch_requests", "shape")

    def shape(
        self, name: str, layers: int, packed_bytes: int, products: int, batches: list[Live]
    ) -> Shape:
        """Return one shape; `products` are the multiply-adds of one row."""
        none = Sums((), [0])
        calls = self._calls.get(name, none)
        curve = self._metrics.curves.get(name)
        busy = sum(one.busy_seconds for one in batches)
        floor = sum(one.floor_seconds for one in batches)
        return Shape(
            shape=name,
            layers=layers,
            packed_bytes=packed_bytes,
            calls_per_second=calls.count / self._seconds,
            p50_seconds=calls.quantile(0.5),
            p99_seconds=calls.quantile(0.99),
            queue_seconds=self._queue.get(name, none).mean,
            kernel_seconds=self._kernel.get(name, none).mean,
            batch_rows=self._rows.get(name, none).mean,
            batch_calls=self._together.get(name, none).mean,
            sweet_spot_rows=None if curve is None else curve.sweet_spot_rows,
            capacity_rows_per_second=None if curve is None else curve.capacity_rows_per_second,
            bytes_per_second=sum(one.nbytes for one in batches) / busy if busy else None,
            roofline_ratio=floor / busy if floor else None,
            busy_ratio=busy / self._device_seconds,
            rows=[self._batches(one, products) for one in batches],
        )

    def _batches(self, one: Live, products: int) -> Rows:
        known = self._metrics.families["qlinear_tuned_bandwidth_bytes_per_second"].numbers
        found = (known.get((one.shape, one.m, name)) for name in self._devices)
        tuned = next((number for number in found if number is not None), None)
        return Rows(
            m=one.m,
            batches_per_second=one.batches / WINDOW_SECONDS,
            rows_per_second=one.rows / WINDOW_SECONDS,
            mean_seconds=one.busy_seconds / one.launches,
            bytes_per_second=one.bytes_per_second,
            tuned_bytes_per_second=None if tuned is None else tuned.value,
            products_per_byte=one.rows * products / one.nbytes,
            products_per_second=one.rows * products / one.busy_seconds,
            roofline_ratio=one.roofline_ratio,
            busy_ratio=one.busy_seconds / self._device_seconds,
        )
