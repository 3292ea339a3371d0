"""What benchmarks of the layers of a block share: flags, the facts beside their figures, the way.

Knows nothing of what is measured; `chain.py` and `kernel_mix.py` do.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import console, machine, write_json
from kernel import commit_of, library_of
from kernel_figures import parse_rows
from kernel_gpu import Gpu, gpu_state
from kernel_ours import Library, LibraryError
from needs_gpu import USAGE, gpu_missing
from rich.console import Console

from qlinear_service.errors import BuildError

Found = dict[str, Any]
"""All that is kept, by name; "machine" has the facts."""


@dataclass(frozen=True, kw_only=True)
class BlockBench:
    """One benchmark, as `run` needs it."""

    prog: str
    description: str
    rows: Sequence[int]
    """Of x, unless told otherwise."""
    replays: int
    measure: Callable[[Gpu, Library, Sequence[int], int], Found]
    """Given rows and replays."""
    show: Callable[[Console, Found], None]
    is_right: Callable[[Found], bool]
    """Whether all results were."""


def run(bench: BlockBench, words: list[str]) -> int:
    """Measure with these flags and return the exit code: 1 if a result was wrong."""
    args = _parse(bench, words)
    if gpu_missing(bench.prog):
        return USAGE
    try:
        with library_of(args.library) as library:
            found = _measured(bench, library, args)
    except (BuildError, LibraryError) as error:
        print(f"{bench.prog}: {error}", file=sys.stderr)
        return 1
    out = console(json_to_stdout=args.json == "-")
    bench.show(out, found)
    write_json(args.json, found)
    return int(not bench.is_right(found))


def _parse(bench: BlockBench, words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=bench.prog,
        description=bench.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rows = ",".join(map(str, bench.rows))
    add = parser.add_argument
    add("--rows", default=rows, metavar="LIST", help="of x (default: %(default)s)")
    replays = "of each graph (default: %(default)s)"
    add("--replays", type=int, default=bench.replays, help=replays)
    add("--library", type=Path, metavar="FILE", help="our library (default: found or built)")
    add("--commit", metavar="TEXT", help="to be noted (default: what git says)")
    add("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    args = parser.parse_args(words)
    try:
        args.rows = parse_rows(args.rows)
    except ValueError as error:
        parser.error(str(error))
    return args


def _measured(bench: BlockBench, library_path: Path, args: argparse.Namespace) -> Found:
    """Return what was found, with the machine, and the GPU before and after."""
    gpu = Gpu()
    library = Library(library_path, gpu)
    gpu.spin_up()
    before = gpu_state()
    found = bench.measure(gpu, library, args.rows, args.replays)
    facts = machine() | {"commit": commit_of(args.commit)}
    facts |= {f"before {name}": value for name, value in before.items()}
    facts |= {f"after {name}": value for name, value in gpu_state().items()}
    return {"machine": facts} | found
