"""What every checkpoint offers to the rest of the program, whatever its files look like.

Opening reads headers and small index tensors only, so that every layer's shape is known up front;
weights are read one layer at a time, or in slabs of a layer's output features.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from qlinear_service.checkpoints.safetensors_file import TensorInfo
from qlinear_service.checkpoints.tensor_files import TensorFiles
from qlinear_service.errors import CheckpointError
from qlinear_service.layers import LayerSpec, LogicalLayer

__all__ = ["Checkpoint", "Module", "Skipped"]

_CPU = torch.device("cpu")


class Skipped(NamedTuple):
    """A tensor of the checkpoint that is not served."""

    name: str
    reason: str


class Module(ABC):
    """One layer of a checkpoint.

    Args:
        files: the checkpoint's tensors.
        tensors: those that the layer is made of, by suffix.
        spec: what it is.
    """

    def __init__(
        self, files: TensorFiles, tensors: Mapping[str, TensorInfo], spec: LayerSpec
    ) -> None:
        self.files, self.tensors, self.spec = files, tensors, spec

    @abstractmethod
    def load(self, begin: int, end: int, device: torch.device) -> LogicalLayer:
        """Read, check and unpack output features `begin` to `end`, as a layer of their own.

        Args:
            begin: a multiple of 64.
            end: a multiple of 64, or n.
            device: where the words are unpacked; the result is there.

        Raises:
            CheckpointError: a value breaks the format's rules.
        """

    @property
    def stored_bytes(self) -> int:
        """Bytes that the layer's tensors take in the checkpoint."""
        return sum(info.nbytes for info in self.tensors.values())

    def tensor(self, suffix: str) -> torch.Tensor:
        """Return one of the layer's tensors, a view of its mapped file."""
        return self.files.load(f"{self.spec.module}.{suffix}")

    def error(self, suffix: str, problem: str) -> CheckpointError:
        """Return an error that names the tensor and its file."""
        name = f"{self.spec.module}.{suffix}"
        return CheckpointError(self.tensors[suffix].path, problem, tensor=name)

    def bias(self, begin: int, end: int, device: torch.device) -> torch.Tensor | None:
        """Return the bias of some features, checked; None if the layer has none."""
        if not self.spec.has_bias:
            return None
        return self.finite("bias", self.tensor("bias")[begin:end].to(device), begin)

    def finite(self, suffix: str, values: torch.Tensor, begin: int) -> torch.Tensor:
        """Return `values` ([..., features from `begin` on]) if none is NaN or infinite."""
        good = torch.isfinite(values)
        if bool(good.all()):
            return values
        place = [int(i) for i in (~good).nonzero()[0]]
        found = float(values[tuple(place)])
        group = f"group {place[0]}, " if len(place) > 1 else ""
        raise self.error(
            suffix,
            f"{group}column {place[-1] + begin} is {found}; expected finite numbers: quantize "
            "again",
        )


class Checkpoint:
    """An open checkpoint folder.

    Args:
        path: the folder.
        model: name of the model; contains no "/".
        format: what was recognised, for people, e.g. "GPTQ (gptq_v2), 4 bits, group_size 128".
        modules: every layer that is served, in the model's order.
        skipped: every tensor that is part of none of them, and why.
    """

    def __init__(
        self,
        *,
        path: Path,
        model: str,
        format: str,
        modules: Sequence[Module],
        skipped: Sequence[Skipped],
    ) -> None:
        self.path, self.model, self.format = path, model, format
        self.modules = {module.spec.module: module for module in modules}
        self.layers = tuple(module.spec for module in modules)
        self.skipped = tuple(skipped)

    def load(
        self, module: str, begin: int = 0, end: int | None = None, device: torch.device = _CPU
    ) -> LogicalLayer:
        """Read, check and unpack the layer called `module` (`LayerSpec.module`), or some of it.

        Raises:
            CheckpointError: its values break the format's rules.
        """
        found = self.modules[module]
        return found.load(begin, found.spec.n if end is None else end, device)

    def stored_bytes(self, module: str) -> int:
        """Return the bytes that the layer's tensors take in the checkpoint."""
        return self.modules[module].stored_bytes
