"""What the native dispatcher takes of its own thread, and what that makes of a load: no GPU needed.

First its own code over a device that costs nothing, all in one thread: nanoseconds of a batch by
its rows, and of each row and each batch beside them. Then a load at random times on a device that
is a timeline: rows in, product and rows out, each busy for so long, and a host that takes so long
to send a batch and to see its end, by one thread or by two. The scheduler and all that keeps count
is the server's; the times are what the flags say, and those that were just measured.
"""

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import console, machine, print_facts, print_table, write_json
from processes import Others

from qlinear_service.errors import QlinearError
from qlinear_service.kernels.ninja import SOURCE_ROOT, find_compiler

ROWS = (1, 2, 4, 8, 16, 32, 64)
FITTED = (4, 32)
"""Rows of the batches by which costs are split into those of a batch and those of each row."""

STEPS = ("hand_in", "start", "end", "take_out")
THREADS = (1, 2)
TIMES = ("send", "end", "product", "in_row", "out_row", "moving")
"""Of the host and the device of a timeline; --help says what they are."""

LOADS = (0.5, 1.0, 2.0)
MICROSECOND = 1e-6


class Device(ctypes.Structure):
    """Mirror of bench_device in dispatcher.cpp, seconds; `in_turn` is 0 or 1."""

    _fields_ = [(name, ctypes.c_double) for name in (*TIMES, "in_turn")]


class Own(ctypes.Structure):
    """Mirror of bench_own, seconds."""

    _fields_ = [
        (name, ctypes.c_double) for name in ("start_batch", "start_row", "end_batch", "end_row")
    ]


class Load(ctypes.Structure):
    """Mirror of bench_load."""

    _fields_ = [
        *(("rows_per_second", ctypes.c_double), ("rows", ctypes.c_int64)),
        ("threads", ctypes.c_int32),
    ]


class Found(ctypes.Structure):
    """Mirror of bench_found."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "batches")),
        *((name, ctypes.c_double) for name in ("seconds", "median", "p99")),
        *((name, ctypes.c_double) for name in ("busy_sending", "busy_ending")),
    ]


def build(folder: Path) -> ctypes.CDLL:
    """Compile the dispatcher with what drives it here."""
    built = folder / "libdispatcher.so"
    sources = [*sorted(SOURCE_ROOT.glob("dispatch/*.cpp")), Path(__file__).with_suffix(".cpp")]
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"]
    words = [find_compiler(), *flags, f"-I{SOURCE_ROOT}", *map(str, sources), "-o", str(built)]
    subprocess.run(words, check=True)
    return ctypes.CDLL(str(built))


def costs(library: ctypes.CDLL, *, batches: int, runs: int) -> dict[int, dict[str, float]]:
    """Return the nanoseconds of a batch by its rows and step: the median of several runs."""
    found: dict[int, list[list[float]]] = {rows: [] for rows in ROWS}
    for _ in range(runs):
        for rows in ROWS:
            took = (ctypes.c_double * len(STEPS))()
            library.bench_costs(ctypes.c_int64(rows), ctypes.c_int64(batches), took)
            found[rows].append(list(took))
    return {
        rows: dict(zip(STEPS, map(statistics.median, zip(*times, strict=True)), strict=True))
        for rows, times in found.items()
    }


def own_of(took: dict[int, dict[str, float]]) -> dict[str, float]:
    """Return the nanoseconds of each batch and of each of its rows, for starting and ending it."""
    few, many = FITTED
    found = {}
    for step in ("start", "end"):
        row = (took[many][step] - took[few][step]) / (many - few)
        found[f"{step}_row"] = row
        found[f"{step}_batch"] = took[few][step] - few * row
    return found


def timeline(
    library: ctypes.CDLL, device: Device, own: dict[str, float], rate: float, *, rows: int
) -> list[dict[str, float]]:
    """Return what becomes of each load, with one thread and with two."""
    seconds = Own(**{name: 1e-9 * nanoseconds for name, nanoseconds in own.items()})
    told = []
    for load in LOADS:
        for threads in THREADS:
            found = Found()
            asked = Load(rows_per_second=load * rate, rows=rows, threads=threads)
            library.bench_timeline(*map(ctypes.byref, (device, seconds, asked, found)))
            told.append(
                {
                    "load": load,
                    "threads": threads,
                    "answered": found.rows / found.seconds,
                    "rows_per_batch": found.rows / found.batches,
                    "p50_seconds": found.median,
                    "p99_seconds": found.p99,
                    "sending": found.busy_sending,
                    "ending": found.busy_ending,
                }
            )
    return told


def read(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(
        prog="qlinear bench dispatch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    times = (
        ("send", 12.0, "the host takes to send a batch"),
        ("end", 4.0, "the host takes to see its end, with the times of its steps"),
        ("product", 17.0, "the product takes"),
        ("in-row", 0.15, "a row takes into the device"),
        ("out-row", 1.05, "a row of results takes out of it"),
        ("moving", 4.0, "passes until the first row is there, either way"),
    )
    for name, standard, text in times:
        parser.add_argument(
            f"--{name}", type=float, default=standard, metavar="MICROSECONDS", help=f"that {text}"
        )
    parser.add_argument(
        "--in-turn", action="store_true", help="no step of a batch runs beside one of another"
    )
    parser.add_argument(
        "--rate", type=float, default=390e3, metavar="ROWS", help="a second, of load 1"
    )
    parser.add_argument("--rows", type=int, default=400_000, help="of each load")
    parser.add_argument("--batches", type=int, default=20_000, help="of each run and size")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="for all figures; - is stdout")
    return parser.parse_args(words)


def print_report(out: Any, report: dict[str, Any]) -> None:
    """Print both tables."""
    own = report["own"]
    title = (
        "the dispatcher's own code, ns a batch; to start one "
        f"{own['start_batch']:.0f} and {own['start_row']:.0f} a row, "
        f"to end it {own['end_batch']:.0f} and {own['end_row']:.0f}"
    )
    rows = [
        [str(count), *(f"{took[step]:.0f}" for step in STEPS)]
        for count, took in report["costs"].items()
    ]
    print_table(out, title, ["rows", *(step.replace("_", " ") for step in STEPS)], rows)
    rows = [
        [
            f"{found['load']:g} x, {found['threads']}",
            f"{found['answered']:,.0f}",
            f"{found['rows_per_batch']:.1f}",
            f"{found['p50_seconds'] / MICROSECOND:.0f}, {found['p99_seconds'] / MICROSECOND:.0f}",
            f"{found['sending']:.2f}, {found['ending']:.2f}",
        ]
        for found in report["timeline"]
    ]
    heads = ["load, threads", "answered", "rows/batch", "p50, p99 µs", "busy sending, ending"]
    words = ", ".join(f"{name} {took:g}" for name, took in report["device_microseconds"].items())
    order = ", one batch at a time" * report["in_turn"]
    print_table(out, f"a timeline, µs: {words}{order}", heads, rows)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = read(words)
    times = {name: getattr(args, name) for name in TIMES}
    device = Device(**{name: MICROSECOND * took for name, took in times.items()})
    device.in_turn = args.in_turn
    others, begun = Others(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        took = costs(library, batches=args.batches, runs=args.runs)
        own = own_of(took)
        found = timeline(library, device, own, args.rate, rows=args.rows)
    report = {
        "costs": took,
        "own": own,
        "device_microseconds": times,
        "in_turn": args.in_turn,
        "timeline": found,
        "others_cores": others.cores(time.process_time() - begun),
        "machine": machine(),
    }
    out = console(json_to_stdout=args.json == "-")
    print_report(out, report)
    print_facts(out, report)
    write_json(args.json, report)


if __name__ == "__main__":
    try:
        main()
    except QlinearError as error:  # no compiler
        sys.exit(f"qlinear bench dispatch: {error}")
