"""Layers that a checkpoint holds unquantized: M.weight float [n, k] and M.bias.

They are skipped, kept as they are (torch multiplies with them), or quantized here, by option.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qlinear_service import __version__
from qlinear_service.checkpoints.calibration import Calibration
from qlinear_service.checkpoints.checkpoint import Module
from qlinear_service.checkpoints.opened import Opened
from qlinear_service.checkpoints.quantize import quantize
from qlinear_service.checkpoints.safetensors_file import FLOAT_CODES, TensorInfo
from qlinear_service.checkpoints.tensor_files import TensorFiles
from qlinear_service.config import AUTO
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import UNQUANTIZED_BITS, LayerSpec, LogicalLayer, Source

__all__ = ["KeptModule", "PlainOptions", "QuantizedHere", "plain_modules", "why_not_linear"]

_TABLES = ("wte", "wpe", "emb", "shared", "relative_attention_bias")
"""Last names of embedding tables that do not say "embed"."""

_TRANSPOSED = {
    "gpt2": ("c_attn", "q_attn", "c_proj", "c_fc"),
    "openai-gpt": ("c_attn", "c_proj", "c_fc"),
}
"""Model types whose modules of these names store [k, n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainOptions:
    """What becomes of unquantized layers."""

    treatment: str = AUTO
    """skip, keep, rtn, mse, or auto: rtn if nothing of the checkpoint is quantized, else skip."""
    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    calibration: Path | None = None
    """File with how much each input feature counts; see `Calibration`."""


def plain_modules(opened: Opened, options: PlainOptions) -> Iterator[Module]:
    """Yield the unquantized layers as the options want them: none if they are to be skipped.

    Raises:
        CheckpointError: the calibration file cannot be used.
    """
    treatment = options.treatment
    if treatment == AUTO:
        treatment = "rtn" if opened.found.family == "plain" else "skip"
    if treatment == "skip":
        return
    names = [n for n, t in opened.modules.items() if why_not_linear(opened, n, t) is None]
    calibration = None if options.calibration is None else Calibration(options.calibration, names)
    for name in names:
        tensors = opened.modules[name]
        used = {suffix: tensors[suffix] for suffix in ("weight", "bias") if suffix in tensors}
        weight = used["weight"]
        if "bias" in used and used["bias"].shape != weight.shape[:1]:
            del used["bias"]  # what it is then, nobody knows; it is named among the skipped
        spec = LayerSpec(
            model=opened.model,
            module=name,
            n=weight.shape[0],
            k=weight.shape[1],
            bits=UNQUANTIZED_BITS,
            group_size=-1,
            symmetric=True,
            has_bias="bias" in used,
            scale_dtype=FLOAT_CODES[weight.dtype],
            source=Source(format="plain"),
        )
        if treatment == "keep":
            yield KeptModule(opened.files, used, spec)
            continue
        made = replace(
            spec,
            bits=options.bits,
            group_size=options.group_size,
            symmetric=options.symmetric,
            source=Source(tool=f"qlinear:{__version__}", format="plain", method=treatment),
        )
        importance = None if calibration is None else calibration.of(name, spec.k)
        yield QuantizedHere(opened.files, used, made, importance)


def why_not_linear(opened: Opened, module: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    """Return why a module without codes is no linear layer with a weight; None if it is one."""
    weight, last = tensors.get("weight"), module.rpartition(".")[2]
    if weight is None or not module or len(weight.shape) < 2:
        return "no quantized weight (norm, bias or buffer)"
    if len(weight.shape) > 2 or 0 in weight.shape:
        return f"a weight of {len(weight.shape)} dimensions is no linear layer"
    if weight.dtype not in FLOAT_CODES:
        return f"weights of dtype {weight.dtype} are not read"
    if "embed" in last or last in _TABLES:
        return "embedding table"
    if last in _TRANSPOSED.get(opened.model_type, ()):
        return f"models of type {opened.model_type} store it transposed, which is not read"
    return None


class KeptModule(Module):
    """A layer that stays as it is."""

    def load(self, begin: int, end: int, device: torch.device) -> LogicalLayer:
        """See `Module.load`."""
        weight = _checked_weight(self, begin, end).to(device)
        return LogicalLayer(
            spec=replace(self.spec, n=end - begin),
            codes=weight.T,
            scales=weight.new_empty(0),
            bias=self.bias(begin, end, device),
        )


class QuantizedHere(Module):
    """A layer that is quantized while it is read.

    Args:
        files: the checkpoint's tensors.
        tensors: weight and bias.
        spec: of the result.
        importance: float32 [k], see `quantize`.
    """

    def __init__(
        self,
        files: TensorFiles,
        tensors: Mapping[str, TensorInfo],
        spec: LayerSpec,
        importance: torch.Tensor | None,
    ) -> None:
        super().__init__(files, tensors, spec)
        self._importance = importance
        self._sums: dict[int, tuple[float, float]] = {}

    @property
    def relative_error(self) -> float:
        """Root mean square error of what was loaded, relative to the weights; weighted as they."""
        error = sum(error for error, _ in self._sums.values())
        squares = sum(squares for _, squares in self._sums.values())
        return float((error / squares) ** 0.5) if squares > 0 else 0.0

    def load(self, begin: int, end: int, device: torch.device) -> LogicalLayer:
        """See `Module.load`."""
        spec = self.spec
        weight = _checked_weight(self, begin, end).to(device).float()
        importance = None if self._importance is None else self._importance.to(device)
        try:
            made = quantize(
                weight,
                bits=spec.bits,
                group_size=spec.group_size,
                symmetric=spec.symmetric,
                scale_dtype=to_torch(spec.scale_dtype),
                search=spec.source.method == "mse",
                importance=importance,
            )
        except ValueError as error:
            raise self.error("weight", f"cannot be quantized: {error}") from None
        self._sums[begin] = (made.squared_error, made.squares)
        return LogicalLayer(
            spec=replace(spec, n=end - begin),
            codes=made.codes,
            scales=made.scales,
            zeros=made.zeros,
            bias=self.bias(begin, end, device),
        )


def _checked_weight(module: Module, begin: int, end: int) -> torch.Tensor:
    """Return rows of a weight, a view of the mapped file, if all numbers are finite."""
    weight = module.tensor("weight")[begin:end]
    good = torch.isfinite(weight)
    if not bool(good.all()):
        row, column = (int(i) for i in (~good).nonzero()[0])
        raise module.error(
            "weight",
            f"weight[{row + begin}, {column}] is {float(weight[row, column])}; expected finite "
            "numbers",
        )
    return weight
