"""How much each input feature counts when a weight is quantized: a file of second moments.

An ordinary safetensors file: for each module a tensor of its name, float [k], with the mean square
of its activations. Whoever has the model can collect them with a few hooks (docs/checkpoints.md).
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from qlinear_service.checkpoints.safetensors_file import FLOAT_CODES, SafetensorsFile
from qlinear_service.errors import CheckpointError

__all__ = ["Calibration"]


class Calibration:
    """An open calibration file.

    Args:
        path: the file.
        modules: those that are quantized; it must hold at least one of them.

    Raises:
        CheckpointError: it cannot be read, or belongs to another model.
    """

    def __init__(self, path: Path, modules: Sequence[str]) -> None:
        self._file = SafetensorsFile(path)
        if modules and not any(module in self._file.tensors for module in modules):
            raise CheckpointError(
                path,
                f"holds no tensor that is called like a module, such as {modules[0]}; expected the "
                "mean squares of this model's activations",
            )

    def of(self, module: str, k: int) -> torch.Tensor | None:
        """Return the second moments of a module's inputs, float32 [k]; None if there are none.

        Raises:
            CheckpointError: they have another form, or are no mean squares.
        """
        info = self._file.tensors.get(module)
        if info is None:
            return None
        if info.shape != (k,) or info.dtype not in FLOAT_CODES:
            raise CheckpointError(
                info.path, f"is {info}; expected {' or '.join(FLOAT_CODES)} [{k}]", tensor=module
            )
        moments = self._file.load(module).float()
        if not bool((torch.isfinite(moments) & (moments >= 0)).all()):
            raise CheckpointError(info.path, "holds a number that is no mean square", tensor=module)
        return moments
