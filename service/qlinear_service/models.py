"""Finds the models at a path: a packed file, a checkpoint folder, or a folder of several of them.

Finding reads headers only. `ModelSource.load_layers` then yields layers in the runtime layout one
at a time, so that a checkpoint is converted without ever being in memory twice.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from qlinear_service.checkpoints import (
    WEIGHTS_SUFFIX,
    Checkpoint,
    PlainOptions,
    Skipped,
    checked_model_name,
    is_checkpoint_file,
    open_checkpoint,
)
from qlinear_service.checkpoints.plain import QuantizedHere
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels import layout
from qlinear_service.kernels.assembly import Converter, Load, Slabs, assemble, slabs
from qlinear_service.layers import LayerSpec, QuantizedLinear
from qlinear_service.packed import PackedFile

__all__ = ["CheckpointModel", "ModelSource", "PackedModel", "discover", "open_model"]

# What file systems put into the root of a volume.
_NOT_OURS = ("lost+found",)


class ModelSource(ABC):
    """One model on disk."""

    path: Path
    name: str
    """Name of the model; contains no "/"."""
    format: str
    """What was recognised, for people."""
    specs: tuple[LayerSpec, ...]
    """The layers that `load_layers` yields, in that order."""
    skipped: tuple[Skipped, ...] = ()
    """Tensors that are not served, and why."""
    layout_version: int | None = None
    """Of a packed file."""

    @abstractmethod
    def load_layers(self, converter: Converter | None = None) -> Iterator[QuantizedLinear]:
        """Yield the layers one at a time, each checked.

        Args:
            converter: where and with what a checkpoint's codes are unpacked and packed; None is
                plain torch on the CPU.

        Raises:
            CheckpointError: a layer's values are damaged or not supported.
        """

    @abstractmethod
    def stored_bytes(self, module: str) -> int:
        """Return the bytes that the layer's tensors take on disk."""

    @abstractmethod
    def verify(self) -> None:
        """Read every tensor and check it.

        Raises:
            CheckpointError: the first one that is damaged or not supported.
        """


class PackedModel(ModelSource):
    """A model in a packed file; layers are mapped, not copied."""

    def __init__(self, path: Path) -> None:
        self._file = PackedFile(path)
        self.path = path
        self.name = checked_model_name(self._file.model, path)
        self.format = f"packed file, layout version {layout.VERSION}"
        self.layout_version = layout.VERSION
        self.specs = self._file.specs

    def load_layers(self, converter: Converter | None = None) -> Iterator[QuantizedLinear]:
        """Yield the layers, mapped from the file."""
        for spec in self.specs:
            yield self._file.load(spec.module)

    def stored_bytes(self, module: str) -> int:
        """Return the bytes that the layer's tensors take in the file, padding included."""
        return self._file.stored_bytes(module)

    def verify(self) -> None:
        """Check every checksum."""
        for spec in self.specs:
            self._file.load(spec.module)


class CheckpointModel(ModelSource):
    """A model in a checkpoint folder; each layer is converted when it is loaded."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.path = checkpoint.path
        self.name = checkpoint.model
        self.format = checkpoint.format
        self.specs = checkpoint.layers
        self.skipped = checkpoint.skipped

    def load_layers(self, converter: Converter | None = None) -> Iterator[QuantizedLinear]:
        """Yield the layers, packed one by one."""
        made = converter or Converter()
        for spec in self.specs:
            yield assemble(spec, self._loader(spec.module, made), using=made.pack_codes)

    def load_slabs(self, converter: Converter) -> Iterator[Slabs]:
        """Yield the layers as slabs, so that not even one of them need be in memory whole."""
        for spec in self.specs:
            load = self._loader(spec.module, converter)
            yield Slabs(spec, slabs(spec, load, using=converter.pack_codes))

    def _loader(self, module: str, converter: Converter) -> Load:
        return lambda begin, end: self._checkpoint.load(module, begin, end, converter.device)

    def relative_errors(self) -> dict[str, float]:
        """Return the error of each layer that was quantized here, as far as it was loaded."""
        return {
            name: module.relative_error
            for name, module in self._checkpoint.modules.items()
            if isinstance(module, QuantizedHere)
        }

    def stored_bytes(self, module: str) -> int:
        """Return the bytes that the layer's tensors take in the checkpoint."""
        return self._checkpoint.stored_bytes(module)

    def verify(self) -> None:
        """Check every value."""
        for _ in self.load_layers():
            pass


def open_model(
    path: Path,
    *,
    name: str | None = None,
    plain: PlainOptions | None = None,
) -> ModelSource:
    """Open the one model at `path`: a packed file or a checkpoint folder.

    Args:
        path: the file or folder.
        name: name for a checkpoint's model; None is the folder's own. A packed file has one.
        plain: what becomes of a checkpoint's unquantized layers.

    Raises:
        CheckpointError: nothing is there, or it is damaged or not supported.
    """
    if not path.exists():
        raise CheckpointError(
            path, "does not exist; expected a packed file, a checkpoint folder or a folder of them"
        )
    if path.is_dir():
        return CheckpointModel(open_checkpoint(path, model=name, plain=plain))
    return PackedModel(path)


def discover(path: Path, *, plain: PlainOptions | None = None) -> list[ModelSource]:
    """Return every model at `path`, sorted by name; `plain` as in `open_model`.

    A folder that holds a checkpoint is one model. Any other folder holds several: each packed
    file in it and each of its subfolders, which must be checkpoints, is one.

    Raises:
        CheckpointError: there is none, two have the same name, or one cannot be used.
    """
    if not path.is_dir() or _is_checkpoint(path):
        return [open_model(path, plain=plain)]
    models: dict[str, ModelSource] = {}
    for child in _children(path):
        model = open_model(child, plain=plain)
        if model.name in models:
            raise CheckpointError(
                child,
                f"its model is called {model.name!r}, like the one in {models[model.name].path}; "
                "rename the folder, or pack one of them again with --name",
            )
        models[model.name] = model
    if not models:
        return [open_model(path)]  # says what an unusable folder lacks, pickles included
    return [models[name] for name in sorted(models)]


def _children(folder: Path) -> list[Path]:
    """Return what may be a model in a folder of several."""
    return [
        child for child in _listing(folder) if child.is_dir() or child.name.endswith(WEIGHTS_SUFFIX)
    ]


def _is_checkpoint(folder: Path) -> bool:
    """Say whether the folder itself is one checkpoint."""
    files = [child for child in _listing(folder) if not child.is_dir()]
    if any(is_checkpoint_file(file.name) for file in files):
        return True
    weights = [file for file in files if file.name.endswith(WEIGHTS_SUFFIX)]
    return bool(weights) and not any(PackedFile.is_packed(file) for file in weights)


def _listing(folder: Path) -> list[Path]:
    try:
        names = sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(folder, f"cannot be read: {error.strerror}") from None
    return [path for path in names if path.name[0] != "." and path.name not in _NOT_OURS]
