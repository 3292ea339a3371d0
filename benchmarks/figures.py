"""Medians, spreads and tables, and the facts about the machine that figures need beside them."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 160  # a table in a file or pipe is not cut to 80 columns


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Compare interleaved runs: the ratio of the medians, and that of each pair as the spread.

    "paired" is the median of the pairs: what the machine did meanwhile is in both runs of a pair.
    """
    pairs = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    return {
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "paired": statistics.median(pairs),
        "lowest": pairs[0],
        "highest": pairs[-1],
    }


def machine() -> dict[str, Any]:
    """Return what a figure cannot be understood without."""
    processor = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    packages = ("qlinear", "grpcio", "protobuf", "torch", "numpy")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "processor": processor or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def console(*, json_to_stdout: bool) -> Console:
    """Return where tables go: stdout unless that is JSON."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(stderr=json_to_stdout, markup=False, highlight=False, width=width)


def print_table(
    out: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    """Print a table with its first column left, the others right."""
    made = Table(box=None, header_style="bold")
    for place, heading in enumerate(headings):
        made.add_column(heading, justify="right" if place else "left")
    for row in rows:
        made.add_row(*row)
    out.print(title, soft_wrap=True)
    out.print(made)
    out.print()


def print_facts(out: Console, report: dict[str, Any]) -> None:
    """Print the machine, and how quiet it was."""
    out.print("  ".join(f"{name} {value}" for name, value in report["machine"].items()))
    out.print(f"other processes kept {report['others_cores']:.1f} cores busy meanwhile")


def verdict(value: float, most: float) -> str:
    """Say whether a value keeps to its target."""
    return f"<= {most:g} {'reached' if value <= most else 'MISSED'}"


def write_json(target: str | None, report: dict[str, Any]) -> None:
    """Write a report to a file, to stdout for "-", or nowhere."""
    if target is None:
        return
    text = json.dumps(report, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)
