"""Draws floor over measured against M. Needs matplotlib, and only where a picture is asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernel_figures import MAIN_VARIANT
from kernel_report import OURS

WIDTH_INCHES, HEIGHT_INCHES, DPI = 9, 5, 144


def lines(geomeans: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return (M, mean ratio) by name: the contestants, and our other variants."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in geomeans:
        main = row["variant"] == MAIN_VARIANT
        if main or row["name"] == OURS:
            name = row["name"] if main else f"{row['name']}, {row['variant']}"
            found.setdefault(name, []).append((row["m"], row["ratio"]))
    return {name: sorted(points) for name, points in found.items()}


def plot(report: dict[str, Any], path: Path) -> None:
    """Write the picture; its format is the ending of `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    drawn = lines(report["geomeans"])
    for name, points in drawn.items():
        rows, ratios = zip(*points, strict=True)
        ours = name.startswith(OURS)
        style = "-" if name == OURS else ":" if ours else "--"
        axes.plot(
            rows,
            ratios,
            style,
            marker="o",
            markersize=4,
            linewidth=2.5 if name == OURS else 1.2,
            label=name,
        )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    ticks = sorted({m for points in drawn.values() for m, _ in points})
    axes.set_xticks(ticks, [str(m) for m in ticks])
    highest = max((ratio for points in drawn.values() for _, ratio in points), default=1)
    axes.set_ylim(0, 1.05 * max(highest, 1))
    axes.set_xlabel("rows of x (M)")
    axes.set_ylabel("floor / measured")
    layers = len({cell["shape"] for cell in report["cells"]})
    gpu, date = report["facts"].get("gpu", ""), report["facts"].get("time", "")[:10]
    axes.set_title(
        f"Geometric mean over {layers} layers, {gpu}, {date}; 1.00 is the floor", fontsize=10
    )
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
