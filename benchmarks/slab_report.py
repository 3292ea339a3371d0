"""The tables of `bench slab`."""

from collections.abc import Sequence
from typing import Any

from figures import print_table
from rich.console import Console

STEPS = ("total", "added", "kernel", "gather", "to_device", "from_device", "scatter")
TARGET_ADDED_SECONDS = 60e-6
TARGET_FILL = 0.2
TARGET_SHARE = 0.8


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
    """Print what the batcher makes of each load that Python offers, and of a lone request."""
    lone, sweet = found["lone"], found["sweet_spot_rows"]
    capacity = found["capacity_rows_per_second"]
    title = (
        f"{where}, fed by Python: sweet spot {sweet} rows, capacity {capacity:,.0f} rows/s; a lone "
        f"request takes {lone['total_seconds'] * 1e6:.0f} µs until it is settled, "
        f"{lone['added_seconds'] * 1e6:.0f} beyond its kernel, "
        f"{lone['told_seconds'] * 1e6:.0f} until its caller runs"
    )
    names = ("asked", "offered", "answered", "refused")
    rows = [
        [
            f"{row['load']:g} x",
            *(f"{row[name]:,.0f}" for name in names),
            f"{row['answered'] / capacity:.2f}",
            f"{row['rows_per_batch']:.1f}",
            f"{row['rows_per_batch'] / sweet:.2f}",
        ]
        for row in found["loads"]
    ]
    print_table(out, title, ["load", *names, "/ capacity", "rows/batch", "/ sweet spot"], rows)


def print_native(out: Console, where: str, found: dict[str, Any]) -> None:
    """Print what the dispatcher makes of each load, beside the targets."""
    lone, sweet = found["lone"], found["sweet_spot_rows"]
    capacity = found["capacity_rows_per_second"]
    lines = ", ".join(
        f"{name} {1e6 * one['total_seconds']:.0f} µs, {1e6 * one['added_seconds']:.0f} beyond its "
        f"kernel ({verdict(one['added_seconds'] < TARGET_ADDED_SECONDS)})"
        for name, one in lone.items()
    )
    title = (
        f"{where}, native, stages:spare {found['variant']}: sweet spot {sweet} rows, capacity "
        f"{capacity:,.0f} rows/s; a lone request {lines}"
    )
    rows = []
    for row in found["loads"]:
        share, filled = row["answered"] / capacity, row["rows_per_batch"] / sweet
        told = ""
        if row["load"] == 1:
            told = f"rows a batch within 20 %: {verdict(abs(filled - 1) <= TARGET_FILL)}"
        elif row["load"] == 2:
            told = f">= 0.8 x capacity: {verdict(share >= TARGET_SHARE)}"
        rows.append(
            [
                f"{row['load']:g} x",
                *(f"{row[name]:,.0f}" for name in ("offered", "answered", "refused")),
                f"{share:.2f}",
                f"{row['rows_per_batch']:.1f}",
                f"{filled:.2f}",
                f"{1e6 * row['kernel_seconds']:.1f}",
                f"{1e6 * row['p50_seconds']:.0f}, {1e6 * row['p99_seconds']:.0f}",
                f"{1e6 * row['feeder_late_seconds']:.0f}",
                told,
            ]
        )
    heads = ["load", "offered", "answered", "refused", "/ capacity", "rows/batch", "/ sweet spot"]
    heads += ["kernel µs", "p50, p99 µs", "producer late µs", "target"]
    print_table(out, title, heads, rows)


def verdict(is_reached: bool) -> str:
    """Say it in a word."""
    return "reached" if is_reached else "MISSED"
