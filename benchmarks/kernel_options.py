"""What `qlinear bench kernel` is asked to do: its flags, as one frozen value.

Read once by the watching process and once, from the same words, by the measuring one.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from kernel_figures import Cell, Shape, Variant, parse_rows, parse_shapes, parse_variants

from qlinear_service.planning.gpus import GPUS

DEFAULT_REPLAYS, QUICK_REPLAYS, LEAST_REPLAYS = 40, 15, 3
DEFAULT_BUDGET_SECONDS = 280.0
SWEEP_SECONDS = 8.0
QUICK_SHAPES, QUICK_ROWS = "l7b.o,l8b.gateup,l70b.down", "1,16,64"
PEERS = ("cublas", "humming", "dequantized")
AS_GPU = "as-"
OTHER_GPUS = {f"{AS_GPU}{gpu.name}": gpu for gpu in GPUS if gpu.major == 8}
"""Modes in which plans for another GPU run here."""

MODES = ("dependent", "invariant", "tuned", "tuned-dependent", *OTHER_GPUS)

EPILOG = """\
method
  Each figure is a median over replays of a CUDA graph that runs one product over distinct copies
  of codes, scales and zero points, 600 MiB of them together: nothing is warm in L2. Contestants
  take turns, to and fro. The floor is the longer of two times: reading all bytes of the product
  once (the fastest of the library's plain read kernels, measured in the same run, before and
  after) and its arithmetic at 800 TFLOP/s. 1.00 is at the floor.
  Before anything of ours is timed, a random sample of its columns is compared with float64; what is
  not right is shown as WRONG and not timed.
  Measuring runs in a process of its own. If a kernel faults or never ends, that step is reported
  and the rest goes on. No setting of the GPU is touched.

variants (--variants)
  f16   float16 x, scales and y, symmetric 4-bit codes, groups of 128; also the peers'
  bf16  the same in bfloat16        zp    with zero points
  g32   groups of 32                8bit  8-bit codes

peers (--peers)
  cublas       float16 weights, the faster of both orders     humming  package humming-kernels
  dequantized  from 1024 rows on: weights dequantized by our library, whole or in slabs that fit
               into the L2 cache, and multiplied by cuBLAS; no server works so

examples
  qlinear bench kernel --json all.json --plot floor.png
  qlinear bench kernel --from-json all.json --roofline roofline.png
  qlinear bench kernel --quick --peers none
  qlinear bench kernel --shapes 'l70b.*,4096x6144' --rows extended --variants none
  qlinear bench kernel --sweep --shapes l8b.down --rows 1,16,64 --json sweep.json

exit code
  0  all figures are there and right, or the budget was spent
  1  one of our results is WRONG, or one of our kernels failed
  2  called wrongly, or without a GPU
"""


@dataclass(frozen=True)
class Options:
    """The flags, parsed."""

    shapes: list[Shape]
    rows: list[int]
    variants: list[Variant]
    peers: list[str]
    peer_variants: list[Variant]
    modes: list[str]
    replays: int
    budget_seconds: float
    sweep: bool
    sweep_seconds: float
    library_file: Path | None
    json: str | None
    plot: Path | None
    roofline: Path | None
    from_json: Path | None
    """Of an earlier run, whose figures are shown instead of new ones."""
    commit: str | None
    journal: Path | None
    """Of the measuring process; None: this is the watching one."""
    deadline: float
    """Of time.time(), for the measuring process."""

    def cells(self) -> list[Cell]:
        """Return what is measured, the most important first."""
        return [
            Cell(variant, shape, m)
            for variant in self.variants
            for shape in self.shapes
            for m in self.rows
        ]


def parse(words: list[str]) -> Options:
    """Parse flags; leaves the program with exit code 2 where they cannot be."""
    parser = _parser()
    args = parser.parse_args(words)
    try:
        return _options(args)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qlinear bench kernel",
        description="Our CUDA kernels on this GPU: against the time that reading their bytes\n"
        "takes, against cuBLAS in float16, and against Humming.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is measured")
    add = what.add_argument
    add("--shapes", metavar="LIST", help="names, patterns or KxN (default: ten layers of Llamas)")
    add("--rows", metavar="LIST", help="of x: numbers, or 'extended' (default: 1,8,16,32,64)")
    add("--variants", metavar="LIST", help="see below; or 'none': f16 alone (default: all)")
    add(
        "--peers",
        default="cublas,humming",
        metavar="LIST",
        help="or none (default: cublas,humming)",
    )
    add("--peer-variants", default="f16", metavar="LIST", help="where peers compete (default: f16)")
    add(
        "--also",
        default="",
        metavar="LIST",
        help="our modes beside the plain one: dependent "
        "(programmatic dependent launch), invariant (of the batch), tuned (plans of the tables "
        "that a server would use), tuned-dependent (both), as-A10 and so on (the plan "
        "for that GPU, its multiprocessors and shared memory, on this one); "
        "a sweep runs in them instead",
    )
    add("--quick", action="store_true", help="three shapes, M = 1, 16, 64, f16, fewer replays")
    add("--sweep", action="store_true", help="try plans for each shape and M, and show the best")
    how = parser.add_argument_group("how")
    add = how.add_argument
    add("--replays", type=int, help=f"of each graph (default: {DEFAULT_REPLAYS})")
    add(
        "--budget-seconds",
        type=float,
        default=DEFAULT_BUDGET_SECONDS,
        metavar="SECONDS",
        help=f"stop cleanly after so long (default: {DEFAULT_BUDGET_SECONDS:g})",
    )
    add(
        "--sweep-seconds",
        type=float,
        default=SWEEP_SECONDS,
        metavar="SECONDS",
        help=f"trying plans of one shape and M (default: {SWEEP_SECONDS:g})",
    )
    add("--library", type=Path, metavar="FILE", help="our library (default: found or built)")
    out = parser.add_argument_group("what is kept")
    add = out.add_argument
    add("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    add("--plot", type=Path, metavar="FILE", help="draw floor over measured: .png or .svg")
    add("--roofline", type=Path, metavar="FILE", help="draw TFLOP/s under both roofs: .png or .svg")
    add("--from-json", type=Path, metavar="FILE", help="show these figures again, and measure none")
    add("--commit", metavar="TEXT", help="to be noted (default: what git says)")
    add("--journal", type=Path, help=argparse.SUPPRESS)  # given: this is the measuring process
    add("--deadline", type=float, help=argparse.SUPPRESS)
    return parser


def _options(args: argparse.Namespace) -> Options:
    peers = [] if args.peers == "none" else _words(args.peers, PEERS, "peer")
    variants = args.variants or ("f16" if args.quick or args.sweep else "all")
    # f16 always competes, unless variants are named one by one.
    found = parse_variants("f16" if variants == "none" else variants)
    replays = args.replays or (QUICK_REPLAYS if args.quick else DEFAULT_REPLAYS)
    if replays < LEAST_REPLAYS:
        raise ValueError(f"--replays is {replays}; a median needs {LEAST_REPLAYS} at least")
    for flag, picture in (("--plot", args.plot), ("--roofline", args.roofline)):
        if picture is not None and picture.suffix not in (".png", ".svg"):
            raise ValueError(f"{flag} {picture}: expected a name that ends in .png or .svg")
    return Options(
        shapes=parse_shapes(args.shapes or (QUICK_SHAPES if args.quick else "*")),
        rows=parse_rows(args.rows or (QUICK_ROWS if args.quick else "default")),
        variants=found,
        peers=[] if args.sweep else peers,
        peer_variants=parse_variants(args.peer_variants),
        modes=_words(args.also, MODES, "mode"),
        replays=replays,
        budget_seconds=args.budget_seconds,
        sweep=args.sweep,
        sweep_seconds=args.sweep_seconds,
        library_file=args.library,
        json=args.json,
        plot=args.plot,
        roofline=args.roofline,
        from_json=args.from_json,
        commit=args.commit,
        journal=args.journal,
        deadline=math.inf if args.deadline is None else args.deadline,
    )


def _words(text: str, known: tuple[str, ...], what: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise ValueError(f"{word!r} is no {what}; there are {', '.join(known)}")
    return words
