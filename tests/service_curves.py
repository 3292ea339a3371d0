"""Cost curves of made-up layers, for tests of what follows from them."""

from qlinear_service.cost import CostCurve, Steps


def curve_of(costs: dict[int, float]) -> CostCurve:
    """Return a curve of seconds by rows."""
    return CostCurve(steps=tuple(Steps(m, 0.0, cost, 0.0) for m, cost in costs.items()))


FLAT = curve_of({1: 100e-6, 8: 100e-6, 16: 103e-6, 32: 108e-6, 64: 150e-6, 256: 400e-6, 1024: 1e-3})
"""Bound by reading weights up to 32 rows, as on a GPU."""

LINEAR = curve_of({m: 200e-6 + m * 200e-6 for m in (1, 2, 4, 8, 16, 32, 64, 256, 1024)})
"""Bound by products from a few rows on, as on a CPU."""
