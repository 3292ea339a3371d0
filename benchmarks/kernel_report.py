"""From the journal to a report: floors, ratios, geometric means, what is bad.

Pure: what was measured comes in as records, and nothing here asks a GPU or a clock.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kernel_figures import (
    MIB,
    VARIANTS,
    Cell,
    Floor,
    Shape,
    geomean,
    moved_bytes,
    reference_floor,
)
from kernel_journal import Journal

OURS, HUMMING, CUBLAS, DEQUANTIZED = "qlinear", "Humming", "cuBLAS", "dequantized"

Record = dict[str, Any]


def build_report(journal: Journal) -> Record:
    """Return everything that was measured, with floors and what follows from them."""
    floor, rows = measured_floor(journal.of("job"))
    cells = [finished(record, floor) for record in journal.of("cell")]
    report: Record = {
        "facts": {k: v for record in journal.of("facts") for k, v in record.items() if k != "kind"},
        "states": journal.of("state"),
        "notes": [record["text"] for record in journal.of("note")],
        "floor_measured": bool(rows),
        "floor": rows,
        "empty_us": [job["empty_us"] for job in journal.of("job")],
        "peak_tflops": floor.peak_tflops,
        "cells": cells,
        "geomeans": geomeans(cells),
        "sweeps": [swept(record, floor) for record in journal.of("sweep")],
        "failures": journal.failures(),
        "left": sum(record["left"] for record in journal.of("stopped")),
    }
    report["wrong"] = [
        f"{cell['key']}: {name}: {result['wrong']}"
        for cell in cells
        for name, result in cell["results"].items()
        if "wrong" in result
    ]
    return report


def measured_floor(jobs: Sequence[Record]) -> tuple[Floor, list[Record]]:
    """Return the faster of all measurements of each size, beside the reference.

    Where nothing was measured the reference stands in, and there are no rows.
    """
    reference = reference_floor()
    if not jobs:
        return reference, []
    rows = []
    for at in range(len(jobs[0]["points"])):
        points = [job["points"][at] for job in jobs]
        best = min(points, key=lambda point: point["us"])
        expected = reference.read_us(best["mib"] * MIB)
        rows.append(
            {
                "mib": best["mib"],
                "us": best["us"],
                "kernel": best["kernel"],
                "gb_per_s": best["mib"] * MIB / best["us"] / 1e3,
                "all_us": [point["us"] for point in points],
                "reference_us": expected,
                "ratio": best["us"] / expected,
            }
        )
    empty = min(job["empty_us"] for job in jobs)
    points_us = ((0.0, empty), *((row["mib"], row["us"]) for row in rows))
    return Floor(points_us, reference.peak_tflops), rows


def cell_of(record: Record) -> Cell:
    """Return the cell that a record is about."""
    shape = Shape(record["shape"], record["k"], record["n"])
    return Cell(VARIANTS[record["variant"]], shape, record["m"])


def finished(record: Record, floor: Floor) -> Record:
    """Return a cell's record with its floor, ratios and rates, and the better of two cuBLAS."""
    cell = cell_of(record)
    floor_us, moved = floor.us(cell), moved_bytes(cell)
    results: dict[str, Record] = {}
    for name, result in record["results"].items():
        results[name] = dict(result)
        if "us" in result:
            results[name] |= {
                "ratio": floor_us / result["us"],
                "gb_per_s": moved / result["us"] / 1e3,
                "tflops": 2 * cell.m * cell.shape.k * cell.shape.n / result["us"] / 1e6,
            }
    both = [name for name in results if name.startswith(f"{CUBLAS} ") and "us" in results[name]]
    if both:
        best = min(both, key=lambda name: results[name]["us"])
        # It reads two bytes for each weight: a rate of our bytes would say nothing.
        results[CUBLAS] = {k: v for k, v in results[best].items() if k != "gb_per_s"}
        results[CUBLAS]["order"] = best.partition(" ")[2]
    return record | {
        "bytes": moved,
        "floor_us": floor_us,
        "reference_floor_us": reference_floor().us(cell),
        "results": results,
    }


def swept(record: Record, floor: Floor) -> Record:
    """Return a sweep's record with its floor and ratios."""
    floor_us = floor.us(cell_of(record))
    finals = [
        row | ({"ratio": floor_us / row["us"]} if "us" in row else {}) for row in record["finals"]
    ]
    return record | {"floor_us": floor_us, "finals": finals}


def contestants(cells: Sequence[Record]) -> list[str]:
    """Return who has a figure, ours first in any case; of cuBLAS only the better."""
    names = dict.fromkeys(
        name
        for cell in cells
        for name, result in cell["results"].items()
        if ("us" in result or name == OURS) and not name.startswith(f"{CUBLAS} ")
    )
    return sorted(names, key=lambda name: (not name.startswith(OURS), name != CUBLAS))


def geomeans(cells: Sequence[Record]) -> list[Record]:
    """Return geometric means over shapes: floor over measured, and ours against each peer."""
    rows = []
    for variant in dict.fromkeys(cell["variant"] for cell in cells):
        for m in dict.fromkeys(cell["m"] for cell in cells):
            these = [c["results"] for c in cells if (c["variant"], c["m"]) == (variant, m)]
            for name in contestants(cells):
                ratios = [r[name]["ratio"] for r in these if "ratio" in r.get(name, {})]
                pairs = [
                    r[name]["us"] / r[OURS]["us"]
                    for r in these
                    if "us" in r.get(name, {}) and "us" in r.get(OURS, {})
                ]
                if ratios:
                    row = {"variant": variant, "m": m, "name": name, "shapes": len(ratios)}
                    rows.append(row | {"ratio": geomean(ratios), "slower": geomean(pairs)})
    return rows


def is_bad(report: Record) -> bool:
    """Say whether one of our results is wrong or missing for a reason of ours."""
    for cell in report["cells"]:
        for name, result in cell["results"].items():
            if name.startswith((OURS, DEQUANTIZED)) and ("wrong" in result or "failed" in result):
                return True
    return any(CUBLAS not in key and HUMMING not in key for key in report["failures"])


def as_json(report: Record) -> Record:
    """Return the report as it is written: without what only takes room."""
    return report | {"variants": {n: dataclasses.asdict(v) for n, v in VARIANTS.items()}}
