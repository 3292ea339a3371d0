"""From a checkpoint to a packed file, with a progress bar, on the fastest device there is.

Whatever ends it early, nothing is left under the file's name.
"""

import contextlib
import signal
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

from qlinear_service.checkpoints import PlainOptions
from qlinear_service.config import AUTO
from qlinear_service.errors import CheckpointError, ConfigError
from qlinear_service.kernels import build
from qlinear_service.kernels.assembly import Converter
from qlinear_service.kernels.backends import CpuKernels
from qlinear_service.models import CheckpointModel, open_model
from qlinear_service.packed_writer import planned_bytes, write_packed

__all__ = ["chosen_device", "convert", "converter_for"]


def convert(
    source: Path,
    output: Path,
    *,
    name: str | None,
    plain: PlainOptions,
    device: torch.device,
) -> CheckpointModel:
    """Pack the checkpoint `source` into the file `output`, and return what was packed.

    Args:
        source: the checkpoint's folder.
        output: the file; one that exists is replaced at the very end.
        name: of the model; None is the folder's.
        plain: what becomes of unquantized layers.
        device: where layers are converted.

    Raises:
        CheckpointError: the checkpoint cannot be read, or the file not be written.
        KeyboardInterrupt: Ctrl-C, or SIGTERM.
    """
    model = open_model(source, name=name, plain=plain)
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
    with (
        _terminated_like_interrupted(),
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task(model.name, total=total)
        write_packed(
            output,
            model.name,
            model.load_slabs(converter_for(device)),
            specs=model.specs,
            progress=lambda written: bar.advance(task, written),
        )
        bar.update(task, completed=total)  # a narrow bias takes less than was planned
    return model


def converter_for(device: torch.device) -> Converter:
    """Return the fastest way to convert layers on a device."""
    if device.type == "cpu":
        with contextlib.suppress(build.ToolMissing):  # torch does it, too
            with build.cpu_library(build.default_cache_dir()) as path:
                kernels = CpuKernels(path, threads=torch.get_num_threads())
            return Converter(pack_codes=kernels.pack_codes)
    return Converter(device=device)


def chosen_device(name: str) -> torch.device:
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
