"""What is known of a checkpoint folder before any format looks at it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from qlinear_service.checkpoints.detect import Detected, QuantizationConfig
from qlinear_service.checkpoints.safetensors_file import TensorInfo
from qlinear_service.checkpoints.tensor_files import TensorFiles
from qlinear_service.errors import CheckpointError

__all__ = ["Opened", "by_module", "natural_order"]

Tensors = Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A folder's files, its configuration and what that was taken for."""

    files: TensorFiles
    modules: Mapping[str, Tensors]
    """Every tensor by module and suffix."""
    config: QuantizationConfig | None
    found: Detected
    model: str
    model_type: str = ""
    """What config.json calls the architecture, e.g. "gpt2"."""


def by_module(tensors: Tensors) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors by module and suffix, modules in natural order.

    Raises:
        CheckpointError: a packed tensor belongs to no module.
    """
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in sorted(tensors.items()):
        module, _, suffix = name.rpartition(".")
        if not module and suffix in ("qweight", "weight_packed", "B"):
            raise CheckpointError(info.path, "belongs to no module", tensor=name)
        modules.setdefault(module, {})[suffix] = info
    return dict(sorted(modules.items(), key=lambda item: natural_order(item[0])))


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    parts: list[str] = re.split(r"([0-9]+)", name)
    return [
        (int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part) for part in parts
    ]
