"""Runs compute-sanitizer's racecheck over every kernel, and judges all that it reports.

    python tests/gpu/racecheck.py LIBRARY [FIRST LAST] [--strict] [--jobs N] [--keep FOLDER]

LIBRARY is one of `python -m qlinear_service.kernels.build --cuda --racecheck` (with --strict) or
--line-info; `make racecheck` does both. Several processes run tests/gpu/sanitize.py side by side.
Exits with 1 if anything is reported but what race_report.py counts apart, or a launch is wrong;
with 2 if compute-sanitizer is not there.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "service"))

from gpu.race_report import RaceReport, read
from gpu.sanitize_chains import CHAINS

from qlinear_service.kernels import cuda_abi

HERE = Path(__file__).resolve().parent
TOOL = "compute-sanitizer"
KERNELS_EACH = 2
"""Of a process: some seconds are its start."""
PRINT_LIMIT = "1000000"
"""All of them: a report that is not shown would be judged by nobody."""
PROCESS_SECONDS = 300.0
USAGE = 2


def parts(first: int, last: int) -> list[tuple[int, int]]:
    """Return the ranges of kernels of the processes."""
    return [(at, min(at + KERNELS_EACH, last)) for at in range(first, last, KERNELS_EACH)]


def check(tool: Sequence[str], library: Path, part: tuple[int, int], keep: Path | None) -> str:
    """Run racecheck over some kernels and return all that was printed."""
    words = [*tool, "--tool", "racecheck", "--print-limit", PRINT_LIMIT, sys.executable]
    words += [str(HERE / "sanitize.py"), str(library), *map(str, part)]
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=PROCESS_SECONDS, check=False,
        )  # fmt: skip
        text = done.stdout
    except subprocess.TimeoutExpired as error:
        text = f"{(error.stdout or b'').decode(errors='replace')}\nstopped after {error.timeout} s"
    if keep is not None:
        (keep / f"racecheck-{part[0]}.txt").write_text(text)
    return text


def run(tool: Sequence[str], library: Path, args: argparse.Namespace) -> RaceReport:
    """Check all that is asked for, some processes at a time, and return what was reported."""
    count = cuda_abi.declare(ctypes.CDLL(str(library))).ql_cuda_kernel_count() + len(CHAINS)
    todo = parts(args.first, min(args.last, count))
    whole = RaceReport()
    columns = TextColumn("racecheck"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with (
        Progress(*columns, console=Console(stderr=True)) as bar,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        task = bar.add_task("", total=len(todo))
        running = {pool.submit(check, tool, library, part, args.keep): part for part in todo}
        for future in as_completed(running):
            report = read(future.result())
            for fault in report.faults(strict=args.strict):
                bar.console.print(f"kernels {running[future]}: {fault}", markup=False)
            whole.add(report)
            bar.advance(task)
    return whole


def main(words: Sequence[str]) -> int:
    """Run what the command line names and return the exit code."""
    parser = argparse.ArgumentParser(prog="racecheck.py", description=__doc__.partition("\n")[0])
    parser.add_argument("library", type=Path, help="with line information")
    parser.add_argument("first", type=int, nargs="?", default=0, help="kernel [%(default)s]")
    parser.add_argument("last", type=int, nargs="?", default=1 << 30, help="stop before it")
    parser.add_argument("--strict", action="store_true", help="LIBRARY was built with --racecheck")
    jobs = min(4, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=jobs, metavar="N", help="at once [%(default)s]")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what was printed there")
    parser.add_argument("--tool", default=TOOL, help="[%(default)s]")
    args = parser.parse_args(words)
    tool = shutil.which(args.tool)
    if tool is None or not args.library.is_file():
        missing = args.library if tool else f"{args.tool} (a part of the CUDA toolkit)"
        print(f"racecheck.py: there is no {missing}", file=sys.stderr)
        return USAGE
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
    report = run([tool], args.library.resolve(), args)
    faults = report.faults(strict=args.strict)
    print("\n".join(faults))
    print(f"{report.right} launches right, {report.wrong} wrong; {len(faults)} findings")
    print(
        f"counted apart: {report.pairs} hazards between sums that are sent and read, "
        f"{report.exited} sent to thread blocks that might have exited"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
