"""The tables of `bench slab`."""

from collections.abc import Sequence
from typing import Any

from figures import print_table
from rich.console import Console

STEPS = ("total", "added", "kernel", "gather", "to_device", "from_device", "scatter")
TARGET_ADDED_SECONDS = 60e-6


def print_ways(out: Console, shape: str, figures: Sequence[dict[str, Any]]) -> None:
    """Print what batches of each size and way take."""
    title = f"{shape} (k x n): one batch at a time, µs, and rows a second with all stages in use"
    best = {
        rows: max(found["rows_per_second"] for found in figures if found["rows"] == rows)
        for rows in {found["rows"] for found in figures}
    }
    rows = [
        [
            f"{found['rows']} {found['way']}",
            *(f"{1e6 * found[step]:.1f}" for step in STEPS),
            f"{found['rows_per_second']:,.0f}"
            + " *" * (found["rows_per_second"] == best[found["rows"]]),
        ]
        for found in figures
    ]
    print_table(out, title, ["rows, way", *STEPS, "rows/s, * best"], rows)


def print_loads(out: Console, where: str, found: dict[str, Any]) -> None:
    """Print what the batcher makes of each offered load."""
    lone, sweet = found["lone"], found["sweet_spot_rows"]
    capacity = found["capacity_rows_per_second"]
    added = lone["added_seconds"]
    verdict = "reached" if added < TARGET_ADDED_SECONDS else "MISSED"
    title = (
        f"{where}, transfers {found['transfers']}: sweet spot {sweet} rows, capacity "
        f"{capacity:,.0f} rows/s; a lone request takes {lone['total_seconds'] * 1e6:.0f} µs, "
        f"{added * 1e6:.0f} beyond its kernel (< 60: {verdict}), "
        f"{lone['told_seconds'] * 1e6:.0f} until its caller runs"
    )
    rows = [
        [
            f"{row['load']:g} x",
            *(f"{row[name]:,.0f}" for name in ("asked", "offered", "answered", "refused")),
            f"{row['answered'] / capacity:.2f}",
            f"{row['rows_per_batch']:.1f}",
            f"{row['rows_per_batch'] / sweet:.2f}",
        ]
        for row in found["loads"]
    ]
    names = ["load", "asked", "offered", "answered", "refused"]
    print_table(out, title, [*names, "/ capacity", "rows/batch", "/ sweet spot"], rows)
