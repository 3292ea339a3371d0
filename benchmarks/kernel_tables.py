"""The tables of the kernel benchmark, the most important last. Prints, and computes nothing."""

from collections.abc import Sequence

from figures import print_table
from kernel_figures import MAIN_VARIANT, geomean
from kernel_report import OURS, Record, contestants
from rich.console import Console

BEST_PLANS = 5
MOST_COLUMNS = 8


def print_report(out: Console, report: Record) -> None:
    """Print the tables, the most important last."""
    print_floor(out, report)
    for sweep in report["sweeps"]:
        print_sweep(out, sweep)
    if report["sweeps"]:
        print_gains(out, report["sweeps"])
    cells = report["cells"]
    for variant in dict.fromkeys(c["variant"] for c in cells if c["variant"] != MAIN_VARIANT):
        here = [cell for cell in cells if cell["variant"] == variant]
        print_variant(out, variant, here, contestants(here))
    if cells:
        print_geomeans(out, report["geomeans"])
        main = [cell for cell in cells if cell["variant"] == MAIN_VARIANT]
        if main:
            print_shapes(out, main)
    facts = {k: v for k, v in report["facts"].items() if k != "architectures"}
    out.print("  ".join(f"{name} {value}" for name, value in facts.items()), soft_wrap=True)
    for state in report["states"]:
        shown = [f"{k} {v}" for k, v in state.items() if k.startswith(("clocks", "temp", "power"))]
        if shown:
            out.print(f"{state['when']}: {', '.join(shown)}", soft_wrap=True)
    for note in report["notes"]:
        out.print(note, soft_wrap=True)
    for key, text in report["failures"].items():
        out.print(f"FAILED {key}: {text}", soft_wrap=True)
    for text in report["wrong"]:
        out.print(f"WRONG {text}", soft_wrap=True)
    if report["left"]:
        out.print(f"the budget was spent: {report['left']} steps are left out")


def print_floor(out: Console, report: Record) -> None:
    """Print what reading takes, beside what it took when the targets were set."""
    if not report["floor_measured"]:
        out.print("reading was not measured: the floor is the reference of benchmarks/data\n")
        return
    rows = [
        [
            f"{row['mib']:g}",
            f"{row['us']:.2f}",
            f"{row['gb_per_s']:,.0f}",
            str(row["kernel"]),
            f"{row['reference_us']:.2f}",
            f"{row['ratio']:.2f}",
        ]
        for row in report["floor"]
    ]
    mean = geomean(row["ratio"] for row in report["floor"])
    empty = " and ".join(f"{us:.2f}" for us in report["empty_us"])
    title = f"Reading, us; this run over the reference: {mean:.2f}; an empty kernel: {empty} us"
    print_table(out, title, ["MiB", "us", "GB/s", "kernel", "reference", "ratio"], rows)


def print_variant(
    out: Console, variant: str, cells: Sequence[Record], names: Sequence[str]
) -> None:
    """Print microseconds and ratios of one variant, a line for each layer and contestant."""
    for rows_of_x in in_columns(cells):
        lines = []
        for shape in dict.fromkeys(cell["shape"] for cell in cells):
            here = {cell["m"]: cell["results"] for cell in cells if cell["shape"] == shape}
            for name in names:
                words = [shown(here.get(m, {}).get(name)) for m in rows_of_x]
                lines.append([shape if name == names[0] else f"  {name}", *words])
        title = f"{variant}: us (floor / measured)"
        print_table(out, title, ["layer", *(f"M={m}" for m in rows_of_x)], lines)


def print_shapes(out: Console, cells: Sequence[Record]) -> None:
    """Print all figures of the main variant: a line for each layer and M."""
    names = contestants(cells)
    if len(in_columns(cells)) > 1:
        print_variant(out, MAIN_VARIANT, cells, names)
        return
    lines = []
    for cell in cells:
        words = [shown(cell["results"].get(name)) for name in names]
        lines.append([cell["shape"], str(cell["m"]), f"{cell['floor_us']:.1f}", *words])
    title = f"{MAIN_VARIANT}: us (floor / measured)"
    print_table(out, title, ["layer", "M", "floor", *names], lines)


def print_geomeans(out: Console, rows: Sequence[Record]) -> None:
    """Print the means over all layers: who is how near to the floor at which M."""
    most = max((row["shapes"] for row in rows), default=0)
    found = {(row["variant"], row["name"], row["m"]): row for row in rows}
    for rows_of_x in in_columns(rows):
        lines = []
        for variant, name in dict.fromkeys((row["variant"], row["name"]) for row in rows):
            here = [found.get((variant, name, m)) for m in rows_of_x]
            lines.append([variant, name, *(mean_text(row, most) for row in here)])
            if not name.startswith(OURS):
                times = [f"{row['slower']:.2f}x" if row and row["slower"] else "-" for row in here]
                lines.append(["", f"  its time over {OURS}'s", *times])
        title = "Geometric means over layers, floor / measured: 1.00 is the floor"
        print_table(out, title, ["variant", "", *(f"M={m}" for m in rows_of_x)], lines)


def in_columns(records: Sequence[Record]) -> list[list[int]]:
    """Return the row counts of some records, in pieces that fit beside each other."""
    rows_of_x = list(dict.fromkeys(record["m"] for record in records))
    return [rows_of_x[at : at + MOST_COLUMNS] for at in range(0, len(rows_of_x), MOST_COLUMNS)]


def print_sweep(out: Console, sweep: Record) -> None:
    """Print the best plans of one layer and M, and the library's own."""
    finals = sweep["finals"]
    kept = finals[:BEST_PLANS] + [row for row in finals[BEST_PLANS:] if row["text"] == sweep["own"]]
    lines = [
        [row["text"], shown(row), "own plan" if row["text"] == sweep["own"] else ""] for row in kept
    ]
    title = (
        f"{sweep['key']}: floor {sweep['floor_us']:.2f} us; {sweep['tried']} plans ran of "
        f"{sweep['candidates']}, {sweep['refused']} refused"
    )
    print_table(out, title, ["plan", "us", ""], lines)


def print_gains(out: Console, sweeps: Sequence[Record]) -> None:
    """Print what the best plan of each layer and M gains over the library's own."""
    lines = []
    for sweep in sweeps:
        own = next((row for row in sweep["finals"] if row["text"] == sweep["own"]), None)
        best = next((row for row in sweep["finals"] if "us" in row), None)
        gain = f"{own['us'] / best['us']:.2f}x" if own and best and "us" in own else "-"
        words = [f"{sweep['floor_us']:.2f}", shown(own), shown(best), gain]
        lines.append([sweep["key"], *words, best["text"] if best else ""])
    print_table(out, "Best plans", ["", "floor", "own plan", "best", "gain", "plan"], lines)


def shown(result: Record | None) -> str:
    """Return a figure as a table shows it."""
    if result is None:
        return "-"
    if result.get("wrong"):
        return "WRONG"
    if "us" not in result:
        return "failed"
    return f"{result['us']:.1f} ({result['ratio']:.2f})"


def mean_text(row: Record | None, most: int) -> str:
    """Return a mean, and of how many layers if not of all."""
    if row is None:
        return "-"
    return f"{row['ratio']:.3f}" + (f" of {row['shapes']}" if row["shapes"] < most else "")
