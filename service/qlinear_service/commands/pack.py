"""`qlinear pack`: turn a checkpoint into one packed file, layer by layer.

The file appears under its name when it is complete; until then, and after any interruption,
nothing does.
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from qlinear_service.checkpoints import checked_model_name
from qlinear_service.errors import CheckpointError
from qlinear_service.models import CheckpointModel, open_model
from qlinear_service.packed import planned_bytes, write_packed

__all__ = ["add_arguments", "run"]

_INTERRUPTED = 130  # what shells report for a program that Ctrl-C ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `qlinear pack`."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the checkpoint folder")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write"
    )
    parser.add_argument("--name", metavar="MODEL", help="name of the model (default: the folder's)")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def run(args: argparse.Namespace) -> int:
    """Pack, and return the exit code."""
    source, output = args.source, args.output
    _check_output(source, output, force=args.force)
    if args.name is not None:
        checked_model_name(args.name, source)
    model = open_model(source, name=args.name)
    if not isinstance(model, CheckpointModel):
        raise CheckpointError(source, "is packed already; expected a checkpoint folder")
    total = planned_bytes(model.specs)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    try:
        with (
            _terminated_like_interrupted(),
            Progress(*columns, console=console, disable=not console.is_terminal) as bar,
        ):
            task = bar.add_task(model.name, total=total)
            write_packed(
                output,
                model.name,
                model.load_layers(),
                specs=model.specs,
                progress=lambda written: bar.advance(task, written),
            )
            bar.update(task, completed=total)  # a narrow bias takes less than was planned
    except KeyboardInterrupt:
        print("qlinear pack: stopped; nothing was written", file=sys.stderr)
        return _INTERRUPTED
    size = output.stat().st_size
    print(f"{output}: model {model.name}, {len(model.specs)} layers, {size} bytes")
    return 0


def _check_output(source: Path, output: Path, *, force: bool) -> None:
    if output.is_dir():
        raise CheckpointError(output, "is a folder; expected the name of the file to write")
    if output.exists() and not force:
        raise CheckpointError(output, "exists already; --force replaces it")
    if not output.parent.is_dir():
        raise CheckpointError(output, f"cannot be written: there is no folder {output.parent}")
    if output.parent.resolve() == source.resolve():
        raise CheckpointError(
            output, "would become part of the checkpoint in the same folder; write it elsewhere"
        )


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM clean up the temporary file as Ctrl-C does."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
