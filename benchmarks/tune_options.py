"""What `qlinear bench tune` is asked to do: its flags, and the cells that they name.

Read once by the watching process and once, from the same words, by the measuring one.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from kernel_figures import (
    Cell,
    Shape,
    Variant,
    parse_rows,
    parse_shapes,
    parse_variants,
    weight_bytes,
)

from qlinear_service.kernels.library_cache import default_cache_dir
from qlinear_service.kernels.tuned_plans import user_path
from qlinear_service.kernels.tuned_table import BUCKETS
from qlinear_service.layers import LayerSpec

PROG = "qlinear bench tune"
BUDGET_SECONDS = 60.0
ROWS = "1,8,16,32,64"
REPLAYS, LEAST_REPLAYS = 21, 5

EPILOG = """\
method
  For each distinct shape and number of rows: the planner's own plan, and those that it weighs,
  most promising first. Each is timed in short graphs, then its own plan and the fastest others
  as `qlinear bench kernel` does it: results are compared with float64, then CUDA graphs over
  distinct cold copies of weights and scales take turns, and the median counts. The planner's
  plan is kept unless another is faster by 2 % at least.
  Time is shared out evenly; what is left when the budget is spent stays untuned.

where it goes
  By default into the cache folder, where servers of this user find it at their next start. Entries
  of the same GPU, driver, shape and rows are replaced, all others stay.

examples
  qlinear bench tune --model model.safetensors --budget-seconds 120
  qlinear bench tune --rows 1,8,16,32,64,128,256 --write tuned.json --json report.json

exit code
  0  all is tuned, or the budget was spent
  1  a plan computed wrongly or failed, or the table cannot be written
  2  called wrongly, or without a GPU
"""


@dataclass(frozen=True)
class TuneOptions:
    """The flags, parsed."""

    cells: tuple[Cell, ...]
    """What is tuned: the largest shapes first, so that buffers are made once."""
    replays: int
    budget_seconds: float
    library_file: Path | None
    write: Path
    json: str | None
    commit: str | None
    journal: Path | None
    """Of the measuring process; None: this is the watching one."""
    deadline: float
    """Of time.time(), for the measuring process."""


def parse(words: list[str]) -> TuneOptions:
    """Parse flags; leaves the program with exit code 2 where they cannot be.

    Raises:
        CheckpointError: there is no model where one is named.
    """
    parser = _parser()
    args = parser.parse_args(words)
    try:
        return _options(args)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Finds the fastest plan of each shape on this GPU and writes a table of them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", type=Path, metavar="PATH", help="the shapes of these models")
    what.add_argument("--shapes", metavar="LIST", help="names, patterns or KxN (default: ten)")
    add("--variants", metavar="LIST", help="of --shapes: f16, bf16, zp, g32, 8bit (default: f16)")
    add("--rows", default=ROWS, metavar="LIST", help=f"some of {_edges()} (default: {ROWS})")
    add(
        "--budget-seconds",
        type=float,
        default=BUDGET_SECONDS,
        metavar="SECONDS",
        help=f"for all of it (default: {BUDGET_SECONDS:g})",
    )
    add("--replays", type=int, default=REPLAYS, help=f"of each graph (default: {REPLAYS})")
    add("--library", type=Path, metavar="FILE", help="our library (default: found or built)")
    add("--write", type=Path, metavar="FILE", help="the table (default: that of this user)")
    add("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    add("--commit", metavar="TEXT", help="to be noted (default: what git says)")
    add("--journal", type=Path, help=argparse.SUPPRESS)  # given: this is the measuring process
    add("--deadline", type=float, help=argparse.SUPPRESS)
    return parser


def _options(args: argparse.Namespace) -> TuneOptions:
    rows = parse_rows(args.rows)
    for m in rows:
        if m not in BUCKETS:
            raise ValueError(f"--rows has {m}; expected some of {_edges()}, where buckets end")
    if not 0 < args.budget_seconds < math.inf:
        raise ValueError(f"--budget-seconds is {args.budget_seconds}; expected more than 0")
    if args.replays < LEAST_REPLAYS:
        raise ValueError(f"--replays is {args.replays}; expected {LEAST_REPLAYS} at least")
    if args.model is not None and args.variants is not None:
        raise ValueError("--variants is for --shapes; layers of --model are what they are")
    if args.model is not None:
        from qlinear_service.models import discover  # packages that shapes alone do not need

        layers = [layer_of(spec) for model in discover(args.model) for spec in model.specs]
    else:
        shapes = parse_shapes(args.shapes or "*")
        layers = [(shape, variant) for variant in parse_variants(args.variants or "f16")
                  for shape in shapes]  # fmt: skip
    distinct = sorted(dict.fromkeys(layers), key=lambda one: -weight_bytes(*one).total)
    return TuneOptions(
        cells=tuple(Cell(variant, shape, m) for shape, variant in distinct for m in rows),
        replays=args.replays,
        budget_seconds=args.budget_seconds,
        library_file=args.library,
        write=args.write or user_path(default_cache_dir()),
        json=args.json,
        commit=args.commit,
        journal=args.journal,
        deadline=math.inf if args.deadline is None else args.deadline,
    )


def layer_of(spec: LayerSpec) -> tuple[Shape, Variant]:
    """Return what is tuned for a layer: its padded sizes, and how it is stored."""
    dtype = spec.compute_dtype
    kind = f"{dtype.text} b{spec.bits} g{spec.group_size}" + " zp" * (not spec.symmetric)
    shape = Shape(f"{spec.k_padded}x{spec.n_padded}", spec.k_padded, spec.n_padded)
    return shape, Variant(kind, dtype, spec.bits, spec.group_size, not spec.symmetric)


def _edges() -> str:
    return ",".join(map(str, BUCKETS))
