"""Layers of integer codes, whatever packs them: w = scale * (code - zero), grouped along k.

A format says where codes, scales and zero points lie; what is the same for all of them is here:
sorting by group, splitting groups, checking numbers.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import torch

from qlinear_service.checkpoints.checkpoint import Module
from qlinear_service.checkpoints.grouping import Grouping, sequential
from qlinear_service.checkpoints.safetensors_file import TensorInfo
from qlinear_service.checkpoints.tensor_files import TensorFiles
from qlinear_service.errors import CheckpointError
from qlinear_service.layers import LayerSpec, LogicalLayer

__all__ = ["AffineModule", "expect_form"]


class AffineModule(Module):
    """A layer of integer codes.

    Args:
        files: where its tensors are.
        tensors: what their headers say, by suffix.
        spec: the layer.
        group_size: the checkpoint's own, which need not be one of the runtime's.
    """

    scales_suffix = "scales"
    """Which tensor an error about a scale names."""

    def __init__(
        self,
        files: TensorFiles,
        tensors: Mapping[str, TensorInfo],
        spec: LayerSpec,
        group_size: int,
    ) -> None:
        super().__init__(files, tensors, spec)
        self._group_size = group_size

    def load(self, begin: int, end: int, device: torch.device) -> LogicalLayer:
        """See `Module.load`."""
        codes = self.codes(begin, end, device)
        scales = self.finite(self.scales_suffix, self.scales(begin, end, device), begin)
        zeros = self.zeros(begin, end, device)
        grouping = self.grouping()
        if grouping.order is not None:
            codes = codes.index_select(0, grouping.order.to(device))
        if grouping.stored is not None:
            stored = grouping.stored.to(device)
            scales = scales.index_select(0, stored)
            zeros = None if zeros is None else zeros.index_select(0, stored)
        return LogicalLayer(
            spec=replace(self.spec, n=end - begin),
            codes=codes,
            scales=scales,
            zeros=zeros,
            bias=self.bias(begin, end, device),
            k_permutation=None if grouping.order is None else grouping.order.to(torch.int32),
        )

    @abstractmethod
    def codes(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """Return the codes of some output features, uint8 [k, end - begin], in stored k order."""

    @abstractmethod
    def scales(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """Return their scales, [stored groups, end - begin]."""

    @abstractmethod
    def zeros(self, begin: int, end: int, device: torch.device) -> torch.Tensor | None:
        """Return their zero points, uint8, as the scales; None for a symmetric layer, checked."""

    def grouping(self) -> Grouping:
        """Return how the stored groups become the runtime's; here they are consecutive."""
        return sequential(self.spec.k, self._group_size)


def expect_form(
    module: str,
    tensors: Mapping[str, TensorInfo],
    suffix: str,
    *,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...] | None = None,
    meaning: str = "",
    because: str = "",
) -> TensorInfo:
    """Return what the header says of a tensor, after comparing it with what it must be.

    Args:
        module: the layer's name.
        tensors: its tensors by suffix.
        suffix: which one.
        dtypes: any of these, as safetensors spells them.
        shape: None allows any two dimensions of at least 1.
        meaning: the shape in letters.
        because: what makes it be so.

    Raises:
        CheckpointError: it is missing, or has another dtype or shape.
    """
    name, info = f"{module}.{suffix}", tensors.get(suffix)
    if info is None:
        others = ", ".join(f"{module}.{other}" for other in tensors)
        path = next(iter(tensors.values())).path
        raise CheckpointError(path, f"is missing beside {others}", tensor=name)
    if info.dtype not in dtypes:
        raise CheckpointError(
            info.path, f"has dtype {info.dtype}; expected {' or '.join(dtypes)}", tensor=name
        )
    if shape is None:
        if len(info.shape) != 2 or 0 in info.shape:
            raise CheckpointError(
                info.path,
                f"has shape {list(info.shape)}; expected {meaning}, both at least 1",
                tensor=name,
            )
    elif info.shape != shape:
        raise CheckpointError(
            info.path,
            f"has shape {list(info.shape)}; expected {list(shape)} = {meaning}, because {because}",
            tensor=name,
        )
    return info
