"""What every checkpoint format offers to the rest of the program, whatever its files look like.

A format is one sibling module with one subclass. Opening reads headers and small index tensors
only, so that every layer's shape is known up front; weights are read one layer at a time.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

from qlinear_service.layers import LayerSpec, LogicalLayer

__all__ = ["Checkpoint", "Skipped"]


class Skipped(NamedTuple):
    """A tensor of the checkpoint that is not served."""

    name: str
    reason: str


class Checkpoint(ABC):
    """An open checkpoint folder."""

    path: Path
    """The folder."""
    model: str
    """Name of the model; contains no "/"."""
    format: str
    """What was recognised, for people, e.g. "GPTQ (gptq_v2), 4 bits, group_size 128"."""
    layers: tuple[LayerSpec, ...]
    """Every layer that can be served, in the model's order."""
    skipped: tuple[Skipped, ...]
    """Every tensor that is not part of one of `layers`, and why."""

    @abstractmethod
    def load(self, module: str) -> LogicalLayer:
        """Read, check and unpack the layer called `module` (`LayerSpec.module`).

        Raises:
            CheckpointError: its values break the format's rules.
        """

    @abstractmethod
    def stored_bytes(self, module: str) -> int:
        """Return the bytes that the layer's tensors take in the checkpoint."""
