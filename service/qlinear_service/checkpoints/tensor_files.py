"""The tensors of a checkpoint folder: one file, several, or shards listed by an index.

Where there is an index it is the authority: each tensor comes from the file it names and no other
file is looked at. Only plain names of `*.safetensors` files inside the folder are followed;
pickles are recognised by their content and never opened.
"""

import os
from pathlib import Path

import torch

from qlinear_service.checkpoints import strict_json
from qlinear_service.checkpoints.safetensors_file import SafetensorsFile, TensorInfo, is_pickle
from qlinear_service.errors import CheckpointError

__all__ = ["INDEX_SUFFIX", "WEIGHTS_SUFFIX", "TensorFiles"]

WEIGHTS_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_STANDARD_INDEX = "model" + INDEX_SUFFIX


class TensorFiles:
    """All tensors of one checkpoint folder by name, gathered over its files."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(folder, "is not a folder; expected a checkpoint folder")
        self.folder = folder
        self.tensors: dict[str, TensorInfo] = {}
        self.unindexed: list[str] = []
        """Tensors that lie in a shard but are not, or are elsewhere, in the index."""
        self._files: dict[Path, SafetensorsFile] = {}
        self._kept: dict[str, str] = {}
        try:
            index = _find_index(folder)
            if index is None:
                self._open_all()
            else:
                self._open_indexed(index)
        except OSError as error:
            raise CheckpointError(folder, f"cannot be read: {error.strerror}") from None
        self._add_shared()

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor `name` of `tensors`, a view of its mapped file."""
        return self._files[self.tensors[name].path].load(self._kept.get(name, name))

    def _add_shared(self) -> None:
        """Add names whose tensor was saved under another name only.

        Libraries write one of the names of a shared tensor, such as tied embeddings, and note the
        others in the file's metadata: name -> the name that was kept.
        """
        for path, file in self._files.items():
            for name, kept in file.metadata.items():
                info = self.tensors.get(kept)
                if info is not None and info.path == path and name not in self.tensors:
                    if not name.isprintable():
                        raise CheckpointError(
                            path, f"tensor name {name!r} holds control characters"
                        )
                    self.tensors[name] = info
                    self._kept[name] = kept

    def _open_all(self) -> None:
        # Hidden files are left-overs of other programs, such as "._model.safetensors" of macOS.
        names = sorted(
            path.name
            for path in self.folder.iterdir()
            if path.name.endswith(WEIGHTS_SUFFIX) and not path.name.startswith(".")
        )
        if not names:
            raise _nothing_to_load(self.folder)
        for file_name in names:
            file = SafetensorsFile(_inside(self.folder, file_name))
            self._files[file.path] = file
            for name, info in file.tensors.items():
                if name in self.tensors:
                    other = self.tensors[name].path.name
                    raise CheckpointError(
                        file.path,
                        f"is also in {other}, and there is no index to say which one counts; "
                        f"remove the stray file or add {_STANDARD_INDEX}",
                        tensor=name,
                    )
                self.tensors[name] = info

    def _open_indexed(self, index: Path) -> None:
        weight_map = strict_json.read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                index, "has no weight_map with entries; expected tensor name -> file name"
            )
        for name, file_name in weight_map.items():
            path = _shard_path(index, name, file_name)
            if path not in self._files:
                self._files[path] = SafetensorsFile(path)
            info = self._files[path].tensors.get(name)
            if info is None:
                raise CheckpointError(
                    path,
                    f"is missing, although {index.name} places it in this file; "
                    "download the folder again",
                    tensor=name,
                )
            self.tensors[name] = info
        self.unindexed = [
            f"{name} in {path.name}"
            for path, file in self._files.items()
            for name in file.tensors
            if weight_map.get(name) != path.name
        ]


def _find_index(folder: Path) -> Path | None:
    found = sorted(p for p in folder.iterdir() if p.name.endswith(INDEX_SUFFIX))
    standard = folder / _STANDARD_INDEX
    if standard in found:
        return standard
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(folder, f"holds several indexes ({names}); expected one")
    return found[0] if found else None


def _shard_path(index: Path, name: str, file_name: object) -> Path:
    """Return the path of the shard that the index assigns `name` to, after every check."""
    plain = isinstance(file_name, str) and file_name.isprintable() and bool(file_name)
    if not plain or any(part in str(file_name) for part in ("/", "\\", "..")):
        raise CheckpointError(
            index,
            f"names the file {str(file_name)[:200]!r}; expected the plain name of a file inside "
            "the folder",
            tensor=name,
        )
    if not str(file_name).endswith(WEIGHTS_SUFFIX):
        raise CheckpointError(
            index,
            f"names the file {file_name!r}; only *{WEIGHTS_SUFFIX} files are opened, because "
            "others may be pickles: convert the checkpoint to safetensors",
            tensor=name,
        )
    path = _inside(index.parent, str(file_name))
    if not path.exists():
        raise CheckpointError(
            index, f"its shard {file_name} is not in the folder; download it again", tensor=name
        )
    return path


def _inside(folder: Path, file_name: str) -> Path:
    """Return folder / file_name unless it is a link that leads out of the folder."""
    path = folder / file_name
    roots = [os.path.realpath(folder)]
    # The Hugging Face cache keeps a revision as links snapshots/<revision>/name -> blobs/<hash>:
    # there, the checkpoint's folder is both.
    if Path(roots[0]).parent.name == "snapshots":
        roots.append(str(Path(roots[0]).parent.parent / "blobs"))
    target = os.path.realpath(path)
    if os.path.dirname(target) not in roots:
        raise CheckpointError(
            path,
            f"is a link to {target}, outside the checkpoint folder; copy the folder with its "
            "links resolved (cp -rL) and load the copy",
        )
    return path


def _nothing_to_load(folder: Path) -> CheckpointError:
    for path in sorted(folder.iterdir()):
        if path.is_file() and is_pickle(path):
            return CheckpointError(
                path,
                "is a pickle or zip file, which is never opened because loading it can run code, "
                f"and there is no *{WEIGHTS_SUFFIX} beside it; convert the checkpoint to "
                "safetensors",
            )
    return CheckpointError(
        folder, f"holds no *{WEIGHTS_SUFFIX} file; expected a safetensors checkpoint"
    )
