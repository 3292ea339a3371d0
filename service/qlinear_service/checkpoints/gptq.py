"""GPTQ safetensors: 4 bits, symmetric, sequential groups.

M.qweight  int32 [k / 8, n]      codes along k, lowest bits first
M.qzeros   int32 [groups, n / 8] zero points along n: minus one in v1, as they are in v2
M.scales   float [groups, n]
M.g_idx    int32 [k], optional   group of each input feature; must be sequential here
M.bias     float [n], optional
"""

import logging

import torch

from qlinear_service.checkpoints.checkpoint import Checkpoint, Skipped
from qlinear_service.checkpoints.detect import QuantizationConfig
from qlinear_service.checkpoints.gptq_modules import (
    GptqModule,
    group_by_module,
    measured_module,
    skipped_tensors,
)
from qlinear_service.checkpoints.gptq_settings import read_settings
from qlinear_service.checkpoints.safetensors_file import FLOAT_CODES
from qlinear_service.checkpoints.tensor_files import TensorFiles
from qlinear_service.checkpoints.words import unpack_words
from qlinear_service.errors import CheckpointError
from qlinear_service.layers import LayerSpec, LogicalLayer
from qlinear_service.log_values import quoted

__all__ = ["GptqCheckpoint"]

logger = logging.getLogger(__name__)


class GptqCheckpoint(Checkpoint):
    """An open GPTQ checkpoint folder.

    Opening checks every dtype and shape against k, n and group_size and reads `g_idx`, which alone
    tells whether groups are sequential. `load` checks the values of one layer and unpacks it.
    """

    def __init__(
        self, files: TensorFiles, config: QuantizationConfig, *, label: str, model: str
    ) -> None:
        self.path = files.folder
        self.model = model
        self._files = files
        self._settings = read_settings(config, label=label)
        self.format = f"GPTQ ({label}), 4 bits, group_size {self._settings.group_size}"
        by_module = group_by_module(files.tensors)
        self._modules = {
            name: measured_module(name, tensors, self._settings)
            for name, tensors in by_module.items()
            if "qweight" in tensors
        }
        if not self._modules:
            raise CheckpointError(self.path, "no tensor is called *.qweight; expected GPTQ modules")
        self.skipped = (
            *skipped_tensors(by_module),
            *(Skipped(name, "the index does not place it there") for name in files.unindexed),
        )
        for module in self._modules.values():
            if "g_idx" in module.tensors:
                self._check_sequential(module)
            if self._settings.symmetric is None:
                self._check_zeros(module)
        self.layers = tuple(self._spec(module) for module in self._modules.values())

    def stored_bytes(self, module: str) -> int:
        """Return the bytes that the layer's tensors take in the checkpoint."""
        return sum(info.nbytes for info in self._modules[module].tensors.values())

    def load(self, module: str) -> LogicalLayer:
        """Read, check and unpack the layer called `module`.

        Raises:
            CheckpointError: a scale or bias is not finite, or the zero points are not symmetric.
        """
        found = self._modules[module]
        self._check_zeros(found)
        scales = self._finite(found, "scales")
        words = self._files.load(f"{module}.qweight")
        codes = unpack_words(words, bits=self._settings.bits).view(found.k, found.n)
        return LogicalLayer(
            spec=self._spec(found),
            codes=codes,
            scales=scales,
            bias=self._finite(found, "bias") if "bias" in found.tensors else None,
        )

    def _spec(self, module: GptqModule) -> LayerSpec:
        return LayerSpec(
            model=self.model,
            module=module.name,
            n=module.n,
            k=module.k,
            bits=self._settings.bits,
            group_size=module.group_size,
            symmetric=True,
            has_bias="bias" in module.tensors,
            scale_dtype=FLOAT_CODES[module.tensors["scales"].dtype],
            source=self._settings.source,
        )

    def _check_sequential(self, module: GptqModule) -> None:
        name = f"{module.name}.g_idx"
        groups_of_k = self._files.load(name)
        outside = ((groups_of_k < 0) | (groups_of_k >= module.groups)).nonzero()
        expected = torch.arange(module.k, dtype=torch.int32)
        expected //= module.k if module.group_size == -1 else module.group_size
        different = (groups_of_k != expected).nonzero()
        if len(outside):
            k = int(outside[0])
            problem = (
                f"g_idx[{k}] = {int(groups_of_k[k])}; expected a group in 0 .. {module.groups - 1}"
            )
        elif len(different):
            k = int(different[0])
            problem = (
                f"g_idx[{k}] = {int(groups_of_k[k])} where sequential groups have "
                f"{int(expected[k])}: act-order, which this version does not load; quantize with "
                "desc_act=false"
            )
        else:
            return
        raise CheckpointError(module.tensors["g_idx"].path, problem, tensor=name)

    def _check_zeros(self, module: GptqModule) -> None:
        """Check that every zero point is 8, whichever of the two ways it is stored in."""
        name, path = f"{module.name}.qzeros", module.tensors["qzeros"].path
        words = unpack_words(self._files.load(name), bits=self._settings.bits)
        stored = words.transpose(1, 2).flatten(1)[:, : module.n]
        labelled, other = (7, 8) if self._settings.zeros_minus_one else (8, 7)
        if bool((stored == labelled).all()):
            return
        if bool((stored == other).all()):
            # Published models carry the wrong label. With symmetric codes the content is
            # unambiguous, and believing the label would shift every weight by one scale.
            logger.warning(
                "zero_points_mislabelled module=%s file=%s stored=%d label=%s label_means=%d "
                "loaded_as=8",
                quoted(module.name), quoted(path), other, quoted(self._settings.source.format),
                labelled,
            )  # fmt: skip
            return
        group, column = (int(i) for i in (stored != labelled).nonzero()[0])
        raise CheckpointError(
            path,
            f"the stored zero point of group {group}, column {column} is "
            f"{int(stored[group, column])}; symmetric codes have {labelled} everywhere, and this "
            "version loads symmetric only",
            tensor=name,
        )

    def _finite(self, module: GptqModule, suffix: str) -> torch.Tensor:
        name = f"{module.name}.{suffix}"
        values = self._files.load(name)
        bad = (~torch.isfinite(values)).nonzero()
        if len(bad):
            place = tuple(int(i) for i in bad[0])
            labels = ("group", "column")[-values.dim() :]
            where = ", ".join(f"{label} {i}" for label, i in zip(labels, place, strict=True))
            raise CheckpointError(
                module.tensors[suffix].path,
                f"{where} is {float(values[place])}; expected finite numbers: quantize again",
                tensor=name,
            )
        return values
