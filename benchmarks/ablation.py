"""What each technique of the Hopper kernels is worth: one of them taken out at a time.

A technique is taken out of a copy of the sources by replacing a line or two (techniques.py), and
the copy is built for sm_90a like the library itself, planner included: where a technique decides
what can be planned, plans are those that would be taken without it. All libraries are then timed
in turn, in one run, on the same layers with cold weights.

    qlinear bench ablation --build DIR     builds all of them; needs nvcc, no GPU
    qlinear bench ablation --run DIR       times them; needs an H100 or H200
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from figures import console, machine, print_table, write_json
from kernel import commit_of
from kernel_figures import VARIANTS, Cell, geomean, parse_rows, parse_shapes, summary
from kernel_gpu import Gpu, gpu_state
from kernel_ours import Library, LibraryError, Ours
from needs_gpu import USAGE, gpu_missing
from rich.progress import track
from techniques import TECHNIQUES, WHOLE, Technique, take_out

import qlinear_service
from qlinear_service.kernels.cuda_abi import CudaFlag

PROG = "qlinear bench ablation"
ROWS = "1,16,32,64,128,256,1024"
LAYERS = "l7b.o,l8b.gateup,l8b.down,l70b.o"
PACKAGE = Path(qlinear_service.__file__).parent
BUILD = """
import shutil, sys
from pathlib import Path
from qlinear_service.errors import BuildError
from qlinear_service.kernels.build_cuda import build_cuda_library
try:
    shutil.copy(build_cuda_library(Path(sys.argv[1]), ("90",)), sys.argv[2])
except BuildError as error:
    sys.exit(f"{sys.argv[3]}: {error}")
"""


def build(folder: Path, names: Sequence[str]) -> None:
    """Build the library whole and without each technique, as DIR/NAME.so.

    Raises:
        subprocess.CalledProcessError: one could not be built, and has said why.
    """
    for technique in track([WHOLE, *TECHNIQUES], description="libraries"):
        if names and technique.name not in names:
            continue
        copy = folder / "sources" / technique.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(PACKAGE, copy / PACKAGE.name, ignore=shutil.ignore_patterns("prebuilt"))
        take_out(technique, copy / PACKAGE.name / "csrc")
        paths = copy / "cache", file_of(folder, technique), f"{PROG}: {technique.name}"
        words = [sys.executable, "-c", BUILD, *map(str, paths)]
        environment = os.environ | {"PYTHONPATH": str(copy)}
        subprocess.run(words, env=environment, check=True, process_group=0)
        shutil.rmtree(copy)


def file_of(folder: Path, technique: Technique) -> Path:
    """Return where the library without a technique lies."""
    return folder / f"{technique.name}.so"


def measure(gpu: Gpu, folder: Path, cells: Sequence[Cell], replays: int) -> list[dict[str, Any]]:
    """Return the microseconds of each library in each cell, and their ratios to the whole one."""
    contestants = {WHOLE.name: Ours(gpu, Library(file_of(folder, WHOLE), gpu))}
    contestants["launches that overlap"] = contestants[WHOLE.name]
    overlapping = CudaFlag.DEPENDENT
    for technique in (WHOLE, *TECHNIQUES):
        if file_of(folder, technique).is_file():
            library = Library(file_of(folder, technique), gpu)
            contestants[technique.name] = Ours(gpu, library, flags=overlapping)
    found = []
    for cell in track(cells, description="cells"):
        x = torch.randn((cell.m, cell.shape.k), device=gpu.device).half() / 64
        y = torch.empty((cell.m, cell.shape.n), device=gpu.device, dtype=torch.float16)
        graphs = {}
        for name, ours in contestants.items():
            prepared = ours.prepare(cell, x, y)
            if prepared.wrong:
                raise SystemExit(f"{name}: {prepared.wrong} results of {cell.key} are wrong")
            graphs[name] = gpu.record(prepared.calls)
        gpu.spin_up()
        times = {name: summary(t)["us"] for name, t in gpu.alternate(graphs, replays).items()}
        whole = times[WHOLE.name]
        ratios = {name: us / whole for name, us in times.items() if name != WHOLE.name}
        found.append({"layer": cell.shape.name, "m": cell.m, "us": times, "without": ratios})
    return found


def rows_of_table(found: Sequence[dict[str, Any]], rows: Sequence[int]) -> list[tuple[str, ...]]:
    """Return a row for each technique: time without it over time with it, by rows of x."""
    lines = []
    for name in found[0]["without"]:
        ratios = (geomean(c["without"][name] for c in found if c["m"] == m) or 0 for m in rows)
        lines.append((name, *(f"{ratio:.2f}" for ratio in ratios)))
    return lines


def parse(words: list[str]) -> argparse.Namespace:
    """Parse flags; leaves the program with exit code 2 where they cannot be."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--build", type=Path, metavar="DIR", help="build all libraries there")
    what.add_argument("--run", type=Path, metavar="DIR", help="time the libraries there")
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="build these alone")
    add("--rows", default=ROWS, metavar="LIST", help="of x (default: %(default)s)")
    add("--layers", default=LAYERS, metavar="LIST", help="names (default: %(default)s)")
    add("--replays", type=int, default=9, help="of each graph (default: 9)")
    add("--commit", metavar="TEXT", help="to be noted (default: what git says)")
    add("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    args = parser.parse_args(words)
    try:
        args.rows, args.layers = parse_rows(args.rows), parse_shapes(args.layers)
    except ValueError as error:
        parser.error(str(error))
    known = [technique.name for technique in (WHOLE, *TECHNIQUES)]
    for name in args.only:
        if name not in known:
            parser.error(f"{name!r} is no technique; there are: {'; '.join(known)}")
    return args


def main(words: list[str]) -> int:
    """Run with these flags."""
    args = parse(words)
    if args.build is not None:
        args.build.mkdir(parents=True, exist_ok=True)
        try:
            build(args.build.resolve(), args.only)
        except subprocess.CalledProcessError:
            return 1
        return 0
    if gpu_missing(PROG):
        return USAGE
    if not file_of(args.run, WHOLE).is_file():
        print(f"{PROG}: {file_of(args.run, WHOLE)} is not there; see --build", file=sys.stderr)
        return USAGE
    gpu, rows = Gpu(), args.rows
    cells = [Cell(VARIANTS["f16"], one, m) for m in rows for one in args.layers]
    try:
        found = measure(gpu, args.run, cells, args.replays)
    except LibraryError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    out = console(json_to_stdout=args.json == "-")
    print_table(
        out,
        "time without over time with, overlapping launches, geometric mean of the layers",
        ("without", *(f"M={m}" for m in rows)),
        rows_of_table(found, rows),
    )
    facts = machine() | {"commit": commit_of(args.commit)} | gpu_state()
    write_json(args.json, {"machine": facts, "cells": found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
