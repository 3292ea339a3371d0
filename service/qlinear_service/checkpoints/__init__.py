"""Checkpoint folders: which format they hold, and their layers one at a time.

`open_checkpoint` is the only entrance. A format is one module with one `Checkpoint` subclass and
one line in `_READERS`; files, configuration and detection are shared by all formats.
"""

from pathlib import Path

from qlinear_service.checkpoints.checkpoint import Checkpoint, Skipped
from qlinear_service.checkpoints.detect import CONFIG_FILES, detect, read_configuration
from qlinear_service.checkpoints.gptq import GptqCheckpoint
from qlinear_service.checkpoints.tensor_files import INDEX_SUFFIX, WEIGHTS_SUFFIX, TensorFiles
from qlinear_service.errors import CheckpointError

__all__ = [
    "WEIGHTS_SUFFIX",
    "Checkpoint",
    "Skipped",
    "checked_model_name",
    "is_checkpoint_file",
    "open_checkpoint",
]

_READERS = {"gptq": GptqCheckpoint}
_LOADED = "this version loads GPTQ, 4 bits, symmetric, sequential groups, from safetensors"


def open_checkpoint(path: Path, *, model: str | None = None) -> Checkpoint:
    """Open the checkpoint folder at `path`.

    Args:
        path: the folder.
        model: name of the model; the folder's name if None.

    Raises:
        CheckpointError: it is damaged, contradicts itself, or holds a format that is not loaded.
    """
    if path.is_file():
        raise CheckpointError(path, "is a file; expected the checkpoint's folder")
    config = read_configuration(path)
    files = TensorFiles(path)
    found = detect(path, config, files.tensors)
    if config is None or found.family not in _READERS:
        where = path if config is None else config.path
        raise CheckpointError(where, f"the checkpoint holds {found.label}; {_LOADED}")
    name = checked_model_name(path.resolve().name if model is None else model, path)
    return _READERS[found.family](files, config, label=found.label, model=name)


def checked_model_name(name: str, path: Path) -> str:
    """Return `name` if a model can be called that.

    Raises:
        CheckpointError: it is empty, has control characters, or a "/", which separates the
            model's name from the module's.
    """
    if not name or "/" in name or not name.isprintable():
        raise CheckpointError(
            path,
            f"its model would be called {name!r}; expected a name without '/' (qlinear pack --name "
            "gives another)",
        )
    return name


def is_checkpoint_file(name: str) -> bool:
    """Say whether a file of that name marks its folder as a checkpoint."""
    return name in CONFIG_FILES or name.endswith(INDEX_SUFFIX)
