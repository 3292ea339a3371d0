"""Metrics with a history for tests of the document, the page and `qlinear top`; no real server."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from measured_layers import ROOFLINE, Layer, Spec, compute, curves_of, metrics_of

from qlinear_service.metrics import Metrics
from qlinear_service.metrics_server import serve_metrics

__all__ = ["HOSTILE", "Clock", "Layer", "busy", "crowd", "port_of"]

HOSTILE = (
    "<img src=x onerror=document.title='hacked'>",
    "</script><script>document.title='hacked'</script>",
    "\x1b[31mred\x1b]0;hacked\x07",
    "[bold]markup[/bold] \"'&amp; \u202egnp.exe",
    "\ud800 half a character",
)
"""Names of layers, as a file of anybody may hold them."""


class Clock:
    """Seconds that go on when they are told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def crowd(layers: int, shapes: int, length: int = 0) -> list[Spec]:
    """Return layers of so many shapes with names of that length at least."""
    return [
        Spec(
            f"model.layers.{number}.mlp.down_proj".ljust(length, "x"), n=16 * (1 + number % shapes)
        )
        for number in range(layers)
    ]


def busy(specs: list[Spec], clock: Clock | None = None) -> Metrics:
    """Return metrics of these layers after a call of each and batches of every size."""
    waiting = {spec.name: 1 for spec in specs}
    more = {} if clock is None else {"clock": clock}
    metrics = metrics_of(
        *specs, roofline=ROOFLINE, waiting=waiting, curves=curves_of(*specs), **more
    )
    traffic(metrics, specs)
    return metrics


def traffic(metrics: Metrics, specs: list[Spec]) -> None:
    """Cause a call of each layer and batches of every size."""
    for spec, rows in itertools.product(specs, (1, 8, 16, 32, 64, 128, 512, 1000)):
        compute(metrics, spec.name, rows)
    for spec in specs:
        metrics.call_finished("MatMul", [spec.name], "OK", 0.002)
    metrics.slot_filled(1e-6)
    metrics.replied(1e-5)


@contextmanager
def port_of(metrics: Metrics, port: int = 0) -> Iterator[str]:
    """Serve these metrics inside the block; yields HOST:PORT."""
    with serve_metrics(metrics, host="127.0.0.1", port=port) as address:
        assert address is not None
        yield address
