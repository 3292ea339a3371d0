"""`qlinear inspect`: show what a checkpoint, a packed file or a folder of models holds.

Reads headers only, unless `--verify` asks for every byte. `--json` prints the same for programs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from qlinear_service.checkpoints import PlainOptions
from qlinear_service.config import AUTO, UNQUANTIZED
from qlinear_service.errors import CheckpointError
from qlinear_service.layers import LayerSpec
from qlinear_service.models import ModelSource, discover

__all__ = ["add_arguments", "run"]

_PIPE_WIDTH = 200  # a table in a file or pipe is not cut to 80 columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `qlinear inspect`."""
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="a packed file, a checkpoint, or a folder of them"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--verify", action="store_true", help="read every tensor and check checksums and values"
    )
    parser.add_argument(
        "--unquantized",
        choices=UNQUANTIZED,
        default=AUTO,
        help="show what `serve` and `pack` would make of a checkpoint with that option [auto]",
    )


def run(args: argparse.Namespace) -> int:
    """Print what is there, and return the exit code."""
    try:
        models = discover(args.path, plain=PlainOptions(treatment=args.unquantized))
        if args.verify:
            for model in models:
                model.verify()
    except CheckpointError as error:
        if args.json:  # for programs, besides the sentence on stderr
            refused = {"path": error.path, "tensor": error.tensor, "problem": error.problem}
            print(json.dumps({"path": str(args.path), "models": [], "refused": refused}, indent=2))
        raise
    if args.json:
        described = [_described(model, verified=args.verify) for model in models]
        print(json.dumps({"path": str(args.path), "models": described}, indent=2))
        return 0
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    # Names come from files: markup in them is text.
    console = Console(markup=False, highlight=False, width=width)
    for model in models:
        _print_model(console, model, verified=args.verify)
    return 0


def _described(model: ModelSource, *, verified: bool) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "format": model.format,
        "layout_version": model.layout_version,
        "verified": verified,
        "layers": [_described_layer(model, spec) for spec in model.specs],
        "skipped": [{"name": name, "reason": reason} for name, reason in model.skipped],
    }


def _described_layer(model: ModelSource, spec: LayerSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "module": spec.module,
        "n": spec.n,
        "k": spec.k,
        "bits": spec.bits,
        "group_size": spec.group_size,
        "symmetric": spec.symmetric,
        "has_bias": spec.has_bias,
        "has_k_permutation": spec.has_k_permutation,
        "scale_dtype": spec.scale_dtype.text,
        "bytes": model.stored_bytes(spec.module),
        "source": {
            "tool": spec.source.tool,
            "format": spec.source.format,
            "method": spec.source.method,
        },
    }


def _print_model(console: Console, model: ModelSource, *, verified: bool) -> None:
    stored = sum(model.stored_bytes(spec.module) for spec in model.specs)
    console.print(f"model {model.name}: {model.format}")
    console.print(f"{model.path}: {len(model.specs)} layers, {stored:,} bytes")
    if verified:
        checked = "checksum" if model.layout_version is not None else "value"
        console.print(f"verified: every {checked} is as it should be")
    console.print(_layer_table(model))
    if model.skipped:
        console.print("not served:")
        for name, reason in model.skipped:
            console.print(f"  {name}  {reason}")
    console.print()


def _layer_table(model: ModelSource) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("module", overflow="fold")
    for heading in ("n", "k", "bits", "group"):
        table.add_column(heading, justify="right")
    for heading in ("symmetric", "bias", "scales", "act-order"):
        table.add_column(heading)
    table.add_column("bytes", justify="right")
    table.add_column("source")
    for spec in model.specs:
        source = spec.source
        table.add_row(
            spec.module,
            str(spec.n),
            str(spec.k),
            str(spec.bits),
            _group(spec),
            _yes(spec.symmetric) if spec.quantized else "-",
            _yes(spec.has_bias),
            spec.scale_dtype.text,
            _yes(spec.has_k_permutation),
            f"{model.stored_bytes(spec.module):,}",
            " ".join(filter(None, (source.method, source.format, source.tool))),
        )
    return table


def _group(spec: LayerSpec) -> str:
    if not spec.quantized:
        return "-"
    return "column" if spec.group_size == -1 else str(spec.group_size)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
