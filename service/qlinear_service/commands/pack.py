"""`qlinear pack`: turn a checkpoint into one packed file, layer by layer.

The file appears under its name when it is complete; until then, and after any interruption,
nothing does. What does the work is conversion.py.
"""

import argparse
import os
import sys
from pathlib import Path

from qlinear_service.config import AUTO, UNQUANTIZED
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels import layout
from qlinear_service.process import tune_conversion

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
    # The first import of torch, after what must be set before it.
    tune_conversion(os.environ)
    from qlinear_service.checkpoints import PlainOptions, checked_model_name
    from qlinear_service.conversion import chosen_device, convert

    if args.name is not None:
        checked_model_name(args.name, source)
    plain = PlainOptions(
        treatment=args.unquantized,
        bits=args.bits,
        group_size=args.group_size,
        symmetric=not args.asymmetric,
        calibration=args.calibration,
    )
    try:
        model = convert(
            source, output, name=args.name, plain=plain, device=chosen_device(args.device)
        )
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


def _check_output(source: Path, output: Path, *, force: bool) -> None:
    if output.is_dir():
        raise CheckpointError(output, "is a folder; expected the name of the file to write")
    if output.exists() and not output.is_file():  # --force would put a file in a device's place
        raise CheckpointError(
            output, "is not a regular file; expected the name of the file to write"
        )
    if output.exists() and not force:
        raise CheckpointError(output, "exists already; --force replaces it")
    if not output.parent.is_dir():
        raise CheckpointError(output, f"cannot be written: there is no folder {output.parent}")
    if output.parent.resolve() == source.resolve():
        raise CheckpointError(
            output, "would become part of the checkpoint in the same folder; write it elsewhere"
        )
