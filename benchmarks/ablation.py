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
from kernel_ours import Library, Ours
from rich.progress import track
from techniques import TECHNIQUES, WHOLE, Technique, take_out

import qlinear_service
from qlinear_service.kernels.cuda_abi import CudaFlag

ROWS = "1,16,32,64,128,256,1024"
LAYERS = "l7b.o,l8b.gateup,l8b.down,l70b.o"
PACKAGE = Path(qlinear_service.__file__).parent
BUILD = """
import shutil, sys
from pathlib import Path
from qlinear_service.kernels.build_cuda import build_cuda_library
shutil.copy(build_cuda_library(Path(sys.argv[1]), ("90",)), sys.argv[2])
"""


def build(folder: Path, names: Sequence[str]) -> None:
    """Build the library whole and without each technique, as DIR/NAME.so."""
    for technique in track([WHOLE, *TECHNIQUES], description="libraries"):
        if names and technique.name not in names:
            continue
        copy = folder / "sources" / technique.name
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(PACKAGE, copy / PACKAGE.name, ignore=shutil.ignore_patterns("prebuilt"))
        take_out(technique, copy / PACKAGE.name / "csrc")
        words = [sys.executable, "-c", BUILD, str(copy / "cache"), str(file_of(folder, technique))]
        subprocess.run(words, env=os.environ | {"PYTHONPATH": str(copy)}, check=True)
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


def main(words: list[str]) -> int:
    """Run with these flags."""
    parser = argparse.ArgumentParser(
        prog="qlinear bench ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--build", type=Path, metavar="DIR", help="build all libraries there")
    what.add_argument("--run", type=Path, metavar="DIR", help="time the libraries there")
    parser.add_argument("--only", nargs="*", default=[], help="build these alone")
    parser.add_argument("--rows", default=ROWS, help=f"of x (default: {ROWS})")
    parser.add_argument("--layers", default=LAYERS, help=f"default: {LAYERS}")
    parser.add_argument("--replays", type=int, default=9, help="of each graph (default: 9)")
    parser.add_argument("--commit", default=None, help="to be noted (default: what git says)")
    parser.add_argument("--json", help="write all figures; - is stdout")
    args = parser.parse_args(words)
    if args.build is not None:
        args.build.mkdir(parents=True, exist_ok=True)
        build(args.build.resolve(), args.only)
        return 0
    rows, gpu = parse_rows(args.rows), Gpu()
    cells = [Cell(VARIANTS["f16"], one, m) for m in rows for one in parse_shapes(args.layers)]
    found = measure(gpu, args.run, cells, args.replays)
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
