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

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from qlinear_service.checkpoints import PlainOptions, checked_model_name
from qlinear_service.config import AUTO, UNQUANTIZED
from qlinear_service.errors import CheckpointError, ConfigError
from qlinear_service.kernels import layout
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
    parser.add_argument(
        "--device",
        default=AUTO,
        help="where layers are converted: cpu, cuda:N, or auto: cuda:0 if there is one [auto]",
    )
    plain = parser.add_argument_group("layers that the checkpoint holds unquantized")
    plain.add_argument(
        "--unquantized",
        choices=UNQUANTIZED,
        default=AUTO,
        help="skip: leave out; keep: as they are; rtn: round to nearest; mse: the range of each "
        "group with the least squared error; auto: rtn if no layer is quantized, else skip [auto]",
    )
    plain.add_argument("--bits", type=int, choices=layout.BITS, default=4, help="of rtn and mse")
    plain.add_argument(
        "--group-size",
        type=int,
        choices=layout.GROUP_SIZES,
        default=128,
        help="input features that share a scale; -1: all [128]",
    )
    plain.add_argument("--asymmetric", action="store_true", help="with zero points")
    plain.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="safetensors file with the mean square of each input feature, by module",
    )


def run(args: argparse.Namespace) -> int:
    """Pack, and return the exit code."""
    source, output = args.source, args.output
    _check_output(source, output, force=args.force)
    if args.name is not None:
        checked_model_name(args.name, source)
    model = open_model(source, name=args.name, plain=_plain(args), device=_device(args.device))
    if not isinstance(model, CheckpointModel):
        raise CheckpointError(source, "is packed already; expected a checkpoint folder")
    if not model.specs:
        raise CheckpointError(source, "holds no linear layer that is served (see --unquantized)")
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
    errors = model.relative_errors()
    if errors:
        print("quantized here; root mean square error relative to the weights:")
        for module, error in errors.items():
            print(f"  {error:.4f}  {module}")
    return 0


def _plain(args: argparse.Namespace) -> PlainOptions:
    return PlainOptions(
        treatment=args.unquantized,
        bits=args.bits,
        group_size=args.group_size,
        symmetric=not args.asymmetric,
        calibration=args.calibration,
    )


def _device(name: str) -> torch.device:
    """Return the device that is asked for.

    Raises:
        ConfigError: there is none of that name.
    """
    if name == AUTO:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if name == "cpu":
        return torch.device(name)
    if kind != "cuda" or not index.isdecimal():
        raise ConfigError(f"--device is {name!r}; expected cpu or cuda:N, as in cuda:0, or {AUTO}")
    if not torch.cuda.is_available() or int(index) >= torch.cuda.device_count():
        raise ConfigError(f"--device is {name!r}, but torch finds no such GPU; try cpu")
    return torch.device(name)


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
