"""`qlinear plan`: how a product is cut on a GPU, and what it takes, at least and as expected.

Works on any machine: GPUs are described by name, and the planner is part of the CPU library.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qlinear_service.config_sources import resolve
from qlinear_service.errors import BuildError, ConfigError
from qlinear_service.kernels import layout
from qlinear_service.kernels.driver import ask_driver
from qlinear_service.kernels.plan_values import plan_text
from qlinear_service.kernels.planner import Planner, load_planner
from qlinear_service.kernels.tuned_plans import entries_for, read_tables
from qlinear_service.planning.gpus import GPUS, GpuFigures, by_driver_name, by_name
from qlinear_service.planning.report import START_US, PlanLine, Shape, plan_lines

__all__ = ["add_arguments", "run"]

ROWS = "1,8,16,32,64,128"
MOST = 1 << 30
PIPE_WIDTH = 200  # a table in a file or pipe is not cut to 80 columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shape, the GPU and the rows."""
    names = ", ".join(gpu.name for gpu in GPUS)
    add = parser.add_argument
    add("--n", type=int, required=True, metavar="N", help="output features")
    add("--k", type=int, required=True, metavar="K", help="input features")
    add("--bits", type=int, default=4, choices=layout.BITS, help="of a code [%(default)s]")
    add(
        "--group-size",
        type=int,
        default=128,
        choices=layout.GROUP_SIZES,
        help="input features that share a scale, -1 for the whole column [%(default)s]",
    )
    add("--m", default=ROWS, metavar="LIST", help="rows of x, one or several [%(default)s]")
    add("--gpu", metavar="NAME", help=f"{names} [the first GPU of this machine]")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--cache-dir", metavar="DIR", help="where built libraries and tuned plans are kept")


def run(args: argparse.Namespace) -> int:
    """Print one line for each number of rows; return 0.

    Raises:
        ConfigError: an argument cannot be used, or there is no such GPU.
    """
    shape = Shape(n=args.n, k=args.k, bits=args.bits, group_size=args.group_size)
    for name, value in (("--n", shape.n), ("--k", shape.k)):
        if not 0 < value < MOST:
            raise ConfigError(f"{name} is {value}; expected 1 to {MOST - 1} features")
    rows = _rows(args.m)
    gpu, driver = _gpu(args.gpu)
    flags = {} if args.cache_dir is None else {"cache_dir": args.cache_dir}
    config = resolve(flags=flags, environ=os.environ, config_file=None).config
    cache_dir: Path = config.kernels.cache_dir
    planner = _planner(cache_dir)
    tables = read_tables(cache_dir)
    tuned = entries_for(tables, gpu.driver_names[0], gpu.sm_count, driver)
    lines = plan_lines(shape, rows, gpu, planner, tuned)
    if args.json:
        print(json.dumps(_described(shape, gpu, lines), indent=2))
    else:
        _print(shape, gpu, lines)
    return 0


def _rows(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 0 < int(word) < MOST for word in words):
        raise ConfigError(f"--m is {text!r}; expected one or several numbers from 1 on: {ROWS}")
    return [int(word) for word in words]


def _gpu(name: str | None) -> tuple[GpuFigures, int | None]:
    """Return the GPU and, if it is of this machine, the CUDA release of its driver."""
    names = ", ".join(gpu.name for gpu in GPUS)
    if name is not None:
        found = by_name(name)
        if found is None:
            raise ConfigError(f"--gpu is {name!r}, of which there are no figures; expected {names}")
        return found, None
    driver = ask_driver()
    if driver.problem or not driver.gpus:
        why = driver.problem or "the driver shows no GPU"
        raise ConfigError(f"{why}; name a GPU with --gpu: {names}")
    found = by_driver_name(driver.gpus[0].name)
    if found is None:
        raise ConfigError(
            f"of {driver.gpus[0].name}, this machine's GPU, there are no figures; name one that "
            f"is like it with --gpu: {names}"
        )
    version = driver.cuda_version
    return found, None if version is None else 1000 * version[0] + 10 * version[1]


def _planner(cache_dir: Path) -> Planner | None:
    try:
        return load_planner(cache_dir)
    except (BuildError, OSError, AttributeError) as error:
        print(f"note: floors only, since there is no planner: {error}", file=sys.stderr)
        return None


def _described(shape: Shape, gpu: GpuFigures, lines: list[PlanLine]) -> dict[str, object]:
    return {
        "shape": asdict(shape) | {"weight_bytes": shape.weight_bytes},
        "gpu": {
            "name": gpu.name,
            "multiprocessors": gpu.sm_count,
            "bytes_per_second": gpu.bytes_per_second,
            "flops": gpu.flops,
            "measured": gpu.measured,
            "source": gpu.source,
        },
        "plans": [asdict(line) for line in lines],
    }


def _print(shape: Shape, gpu: GpuFigures, lines: list[PlanLine]) -> None:
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(markup=False, highlight=False, width=width)
    group = "one group a column" if shape.group_size == -1 else f"groups of {shape.group_size}"
    console.print(
        f"n={shape.n} k={shape.k}, {shape.bits} bits, {group}: {shape.weight_bytes:,} bytes",
        soft_wrap=True,
    )
    console.print(
        f"{gpu.name}: {gpu.sm_count} multiprocessors, {gpu.bytes_per_second / 1e12:.3g} TB/s, "
        f"{gpu.flops / 1e12:g} TFLOP/s ({gpu.source})",
        soft_wrap=True,
    )
    table = Table(box=None, header_style="bold")
    for heading in ("M", "flop/byte", "bound", "floor us", "expected us", "of floor"):
        table.add_column(heading, justify="right")
    for heading in ("fp16 floor us", "speed-up"):
        table.add_column(heading, justify="right")
    table.add_column("time is")
    table.add_column("plan")
    for line in lines:
        table.add_row(
            str(line.m),
            f"{line.intensity:.1f}",
            line.bound,
            f"{line.floor_us:.1f}",
            _number(line.expected_us, ".1f"),
            _number(line.floor_ratio, ".2f"),
            f"{line.fp16_floor_us:.1f}",
            _number(line.speedup, ".1f"),
            line.source,
            "-" if line.plan is None else plan_text(line.plan),
        )
    console.print(table)
    if not all(line.measured for line in lines):
        told = "the larger of the floor and the planner's model, which is fitted to an H200,"
        console.print(f"model: not measured; {told} and {START_US} us to start", soft_wrap=True)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
