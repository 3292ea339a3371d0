"""From the journal of `qlinear bench tune` to a run of a table, and what people read of it.

Plain arithmetic, tested without a GPU.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from figures import print_table
from kernel_figures import Cell, geomean
from kernel_journal import Journal
from rich.console import Console

from qlinear_service import __version__
from qlinear_service.kernels.plan_values import plan_text
from qlinear_service.kernels.tuned_table import Entry, Form, Run

Record = dict[str, Any]

LEAST_GAIN = 1.02
"""The planner's plan stays unless it takes so many times as long as another: less is noise."""

METHOD = (
    "medians of CUDA graphs over distinct cold copies of weights and scales, plans in alternating "
    "order, results compared with float64 before; the planner's own unless another is 2 % faster"
)


def entry_of(cell: Cell, record: Mapping[str, Any]) -> Entry | None:
    """Return what a table keeps of a cell; None if the planner's plan has no time to compare with.

    Args:
        cell: what was tuned.
        record: of the journal: `own` plan, and `finals` with their microseconds.
    """
    finals = [one for one in record["finals"] if "us" in one]  # what is wrong is not timed
    own = next((one for one in finals if one["plan"] == record["own"]), None)
    if own is None:
        return None
    best = min(finals, key=lambda one: float(one["us"]))
    kept = own["us"] < LEAST_GAIN * best["us"]
    taken = own if kept else best
    return Entry(
        form=Form.of(
            n=cell.shape.n,
            k=cell.shape.k,
            bits=cell.variant.bits,
            group_size=cell.variant.group_size,
            zeros=cell.variant.has_zeros,
            dtype=cell.variant.dtype,
        ),
        m=cell.m,
        plan=taken["plan"],
        kept=kept,
        us=round(taken["us"], 3),
        planner_us=round(own["us"], 3),
        tried=record["tried"],
    )


def entries_of(cells: Sequence[Cell], journal: Journal) -> dict[Cell, Entry]:
    """Return what was found for each cell."""
    records = {record["key"]: record for record in journal.of("job")}
    found = {cell: entry_of(cell, records[cell.key]) for cell in cells if cell.key in records}
    return {cell: entry for cell, entry in found.items() if entry is not None}


def run_of(
    entries: Sequence[Entry], facts: Mapping[str, Any], *, library: str, commit: str, command: str
) -> Run:
    """Return the run that a table is given.

    Args:
        entries: what was found.
        facts: of the journal: the GPU.
        library: hash of the sources of the kernels.
        commit: of the checkout.
        command: as it was called.
    """
    return Run(
        gpu=facts["gpu_name"],
        sm_count=facts["sm_count"],
        cuda_driver=facts["cuda_driver"],
        driver=facts["driver"],
        library=library,
        commit=commit,
        version=__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        method=METHOD,
        entries=tuple(entries),
    )


def troubles(cells: Sequence[Cell], journal: Journal) -> dict[str, str]:
    """Return what failed or was wrong, by cell or plan."""
    found = dict(journal.failures())
    for record in journal.of("job"):
        for one in record["finals"]:
            if one.get("wrong"):
                found[f"{record['key']}/{one['text']}"] = f"WRONG: {one['wrong']}"
    return found


def print_entries(out: Console, entries: Mapping[Cell, Entry], left: int) -> None:
    """Print what the planner's plan and the best take, and which that is."""
    rows = [
        [
            f"{cell.variant.name} {cell.shape.name}",
            str(cell.m),
            f"{entry.planner_us:.2f}",
            f"{entry.us:.2f}",
            f"{entry.planner_us / entry.us:.3f}",
            str(entry.tried),
            "planner's" if entry.kept else plan_text(entry.plan),
        ]
        for cell, entry in entries.items()
    ]
    headings = ["shape", "M", "planner us", "best us", "ratio", "tried", "plan"]
    if rows:
        mean = geomean(entry.planner_us / entry.us for entry in entries.values())
        print_table(out, f"Planner over best: {mean:.3f} (geometric mean)", headings, rows)
    if left:
        out.print(f"the budget was spent: {left} of {left + len(entries)} stay untuned")
