"""Draws what was measured under the roofs of the GPU: TFLOP/s against operations per byte.

Bytes are those that the contestant itself must move: cuBLAS reads two for each weight, so its
points lie further left. Needs matplotlib, and only where a picture is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_figures import MAIN_VARIANT, MIB, reference_floor
from kernel_plot import DPI
from kernel_report import CUBLAS, HUMMING, OURS, cell_of

WIDTH_INCHES, HEIGHT_INCHES = 12, 5
DENSE_BYTES = 2
"""Of a weight in float16."""
LEAST_AREA, MOST_AREA, EDGE = 12, 60, 0.4
"""Of markers: the larger a layer, the larger; in points."""
LEAST_X, MOST_X, LEAST_Y, MOST_Y = 0.7, 12_000, 2, 1500


@dataclass(frozen=True)
class Point:
    """One measured product."""

    shape: str
    m: int
    weights: int
    operations_per_byte: float
    tflops: float


def points(cells: Sequence[dict[str, Any]]) -> dict[str, list[Point]]:
    """Return the points of ours and of each peer that has figures, of the main variant."""
    found: dict[str, list[Point]] = {}
    for name in (OURS, HUMMING, CUBLAS):
        for record in cells:
            result = record["results"].get(name, {})
            if record["variant"] != MAIN_VARIANT or "us" not in result:
                continue
            m, k, n = record["m"], record["k"], record["n"]
            moved = record["bytes"]
            if name == CUBLAS:
                size = cell_of(record).variant.dtype.itemsize
                moved = DENSE_BYTES * n * k + (k + n) * m * size
            point = Point(record["shape"], m, n * k, 2 * m * n * k / moved, result["tflops"])
            found.setdefault(name, []).append(point)
    return found


def roofs(report: dict[str, Any]) -> tuple[float, float]:
    """Return the largest read rate, in TB/s, and the product rate, in TFLOP/s."""
    rates = [row["gb_per_s"] / 1e3 for row in report["floor"]]
    if not rates:
        rates = [mib * MIB / us / 1e6 for mib, us in reference_floor().points]
    return max(rates), report["peak_tflops"]


def draw_roofline(report: dict[str, Any], path: Path) -> None:
    """Write the picture, a field for each contestant; its format is the ending of `path`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, (read_tb, peak) = points(report["cells"]), roofs(report)
    rows = sorted({point.m for some in drawn.values() for point in some})
    colours = {m: pyplot.get_cmap("turbo")((i + 0.5) / len(rows)) for i, m in enumerate(rows)}
    sizes = sorted({point.weights for some in drawn.values() for point in some})
    step = (MOST_AREA - LEAST_AREA) / len(sizes)
    areas = {weights: LEAST_AREA + step * i for i, weights in enumerate(sizes)}
    size = (WIDTH_INCHES, HEIGHT_INCHES)
    figure, fields = pyplot.subplots(
        1, len(drawn), figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    for axes, (name, some) in zip(fields[0], drawn.items(), strict=True):
        ridge = peak / read_tb
        axes.plot([LEAST_X, ridge, MOST_X], [LEAST_X * read_tb, peak, peak], color="black")
        axes.text(ridge / 5, peak / 4, f"{read_tb:.2f} TB/s", fontsize=8, ha="right")
        axes.text(MOST_X, peak * 1.06, f"{peak:.0f} TFLOP/s", fontsize=8, ha="right")
        for m in rows:
            here = [point for point in some if point.m == m]
            axes.scatter(
                [point.operations_per_byte for point in here],
                [point.tflops for point in here],
                s=[areas[point.weights] for point in here],
                color=colours[m],
                edgecolors="black",
                linewidths=EDGE,
                label=f"M = {m}" if name == OURS else None,
                zorder=3,
            )
        axes.set(xscale="log", yscale="log", xlim=(LEAST_X, MOST_X), ylim=(LEAST_Y, MOST_Y))
        weights = "float16" if name == CUBLAS else "4-bit"
        axes.set_title(f"{name} ({weights} weights)", fontsize=10)
        axes.set_xlabel("operations per byte that it must move")
        axes.grid(alpha=0.25, which="both", linewidth=0.5)
    fields[0][0].set_ylabel("TFLOP/s")
    facts, layers = report["facts"], len({cell["shape"] for cell in report["cells"]})
    words = [facts.get("gpu", ""), facts.get("time", "")[:10], f"commit {facts.get('commit')}"]
    figure.suptitle(f"{layers} layers, {', '.join(filter(None, words))}", fontsize=10)
    figure.legend(loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
