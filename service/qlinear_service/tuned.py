"""The gauges that load and speed are compared with: what the cost curves say of each shape.

Set once, when models are loaded. Knows no event and no time.
"""

from collections.abc import Iterable, Mapping

from qlinear_service.cost import CostCurve
from qlinear_service.measured import MeasuredLayer
from qlinear_service.metric_families import Family, m_label

__all__ = ["show_curves"]

MEASURED_ITEMSIZE = 2
"""Bytes of an element of x and y while the cost curves were measured."""


def show_curves(
    families: Mapping[str, Family],
    layers: Iterable[MeasuredLayer],
    curves: Mapping[str, CostCurve],
    *,
    device: str,
) -> None:
    """Set the sweet spot of each shape, and the bandwidth of each shape and m.

    Args:
        families: all metrics by name.
        layers: the loaded ones.
        curves: by shape; shapes without one get no series.
        device: their label.
    """
    sweet_spots = families["qlinear_sweet_spot_rows"]
    rates = families["qlinear_tuned_bandwidth_bytes_per_second"]
    for shape, layer in {layer.spec.shape: layer for layer in layers}.items():
        curve = curves.get(shape)
        if curve is None:
            continue
        sweet_spots.number(shape, device).value = curve.sweet_spot_rows
        row_bytes = MEASURED_ITEMSIZE * (layer.spec.k + layer.spec.n)
        for step in curve.steps:  # ascending: the largest m of each label stays
            nbytes = layer.streamed_bytes + step.rows * row_bytes
            rates.number(shape, m_label(step.rows), device).value = nbytes / step.kernel_seconds
