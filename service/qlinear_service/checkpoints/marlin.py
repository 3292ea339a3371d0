"""Files in the layout of the Marlin kernel: IST-DASLab, AutoGPTQ, GPTQModel 1.x, AutoAWQ.

M.B     int32 [k / 16, 2 n]  codes in tiles of 16 x 16 (AutoAWQ: M.qweight)
M.s     float [groups, n]    columns in an order of their own (AutoAWQ: M.scales)
M.bias  float [n], optional

4 bits, symmetric, sequential groups. One word holds eight codes of one tile: rows 2t, 2t + 1,
2t + 8, 2t + 9 of columns c and c + 8, where the word stands at 16 c + 4 t + tile in a run of 128
words for four tiles side by side. Slot 4 * k_odd + 2 * n_half + k_half holds row
8 * k_half + 2 * t + k_odd of column 8 * n_half + c.
"""

import logging
from collections.abc import Iterator, Mapping

import torch

from qlinear_service.checkpoints.affine import AffineModule, expect_form
from qlinear_service.checkpoints.checkpoint import Module
from qlinear_service.checkpoints.grouping import sequential
from qlinear_service.checkpoints.opened import Opened
from qlinear_service.checkpoints.safetensors_file import FLOAT_CODES, TensorInfo
from qlinear_service.checkpoints.tensor_files import TensorFiles
from qlinear_service.checkpoints.words import unpack_columns
from qlinear_service.errors import CheckpointError
from qlinear_service.layers import LayerSpec, Source
from qlinear_service.log_values import event

__all__ = ["MarlinModule", "describe", "read"]

logger = logging.getLogger(__name__)

_NAMES = {"B": "s", "qweight": "scales"}
"""What codes and scales are called."""
_NEVER_BESIDE = ("qzeros", "g_idx", "meta")
"""Tensors that the format does not have: with one of them it is another."""


def describe(opened: Opened) -> str:
    """Return what was recognised, for people."""
    group_size = _group_size(opened)
    said = "" if group_size is None else f", group_size {group_size}"
    return f"Marlin ({opened.found.label}), 4 bits{said}"


def read(opened: Opened) -> Iterator[Module]:
    """Yield the quantized modules, every dtype and shape compared with the settings.

    Raises:
        CheckpointError: the configuration or a module cannot be used.
    """
    group_size = _group_size(opened)
    for name, tensors in opened.modules.items():
        for codes, scales in _NAMES.items():
            if codes in tensors:
                yield _module(opened, name, tensors, codes, scales, group_size)


def _group_size(opened: Opened) -> int | None:
    """Return the configuration's group size, after comparing what else it says."""
    config = opened.config
    if config is None:
        return None
    fixed = {"bits": 4, "sym": True, "zero_point": False, "pack_dtype": "int32"}
    for key, only in fixed.items():
        value = config.get(key)
        if value is not None and value != only:
            raise config.error(key, f"{key} is {value!r}; Marlin files have {only!r}")
    size = config.get("group_size")
    valid = isinstance(size, int) and not isinstance(size, bool) and (size == -1 or size > 0)
    if size is not None and not valid:
        raise config.error("group_size", f"group_size is {size!r}; expected -1 or more than 0")
    return size if isinstance(size, int) else None


def _module(
    opened: Opened,
    name: str,
    tensors: Mapping[str, TensorInfo],
    codes: str,
    scales: str,
    group_size: int | None,
) -> Module:
    packed = expect_form(name, tensors, codes, dtypes=("I32",), meaning="[k / 16, 2 n]")
    k, n = 16 * packed.shape[0], packed.shape[1] // 2
    if packed.shape[1] % 128:
        problem = f"has shape {list(packed.shape)}; expected a width that 128 divides"
        raise CheckpointError(packed.path, problem, tensor=f"{name}.{codes}")
    for suffix in _NEVER_BESIDE:
        if suffix in tensors:
            problem = "has no place in a Marlin layer: 4 bits, symmetric, sequential groups"
            raise CheckpointError(tensors[suffix].path, problem, tensor=f"{name}.{suffix}")
    stored = tensors.get(scales)
    groups = stored.shape[0] if stored is not None and len(stored.shape) == 2 else 0
    if group_size is None:  # only the tensors tell
        group_size = -1 if groups < 2 else -(-k // groups)
    expected = 1 if group_size == -1 or group_size >= k else -(-k // group_size)
    because = f"{name}.{codes} {list(packed.shape)} means k = {k} and n = {n}, group_size is "
    expect_form(
        name, tensors, scales, dtypes=tuple(FLOAT_CODES), shape=(expected, n),
        meaning="[groups, n]", because=because + str(group_size),
    )  # fmt: skip
    if "bias" in tensors:
        # Some tools pad n up to 256, and only a bias would tell the true one.
        expect_form(
            name, tensors, "bias", dtypes=tuple(FLOAT_CODES), shape=(n,), meaning="[n]",
            because=f"{name}.{codes} {list(packed.shape)} means n = {n}",
        )  # fmt: skip
    try:
        grouping = sequential(k, group_size)
    except ValueError as error:
        raise CheckpointError(packed.path, str(error), tensor=name) from None
    spec = LayerSpec(
        model=opened.model,
        module=name,
        n=n,
        k=k,
        bits=4,
        group_size=grouping.size,
        symmetric=True,
        has_bias="bias" in tensors,
        scale_dtype=FLOAT_CODES[tensors[scales].dtype],
        source=_source(opened),
    )
    used = {suffix: tensors[suffix] for suffix in (codes, scales, "bias") if suffix in tensors}
    return MarlinModule(opened.files, used, spec, (codes, scales), group_size)


def _source(opened: Opened) -> Source:
    meta = opened.config.get("meta") if opened.config else None
    tool = meta.get("quantizer") if isinstance(meta, dict) else ""
    return Source(tool=tool if isinstance(tool, str) else "", format=opened.found.label)


class MarlinModule(AffineModule):
    """One Marlin module; see the head of this file."""

    def __init__(
        self,
        files: TensorFiles,
        tensors: Mapping[str, TensorInfo],
        spec: LayerSpec,
        names: tuple[str, str],
        group_size: int,
    ) -> None:
        super().__init__(files, tensors, spec, group_size)
        self._codes, self.scales_suffix = names

    def codes(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """See `AffineModule.codes`."""
        words = self.tensor(self._codes)[:, 2 * begin : 2 * end].to(device)
        # k tile, n run, c, t, tile; k odd, n half, k half.
        sizes = (words.shape[0], (end - begin) // 64, 8, 4, 4, 2, 2, 2)
        codes = unpack_columns(words, bits=4).view(sizes)
        return codes.permute(0, 7, 3, 5, 1, 4, 6, 2).reshape(self.spec.k, end - begin)

    def scales(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """See `AffineModule.scales`."""
        stored = self.tensor(self.scales_suffix)[:, begin:end].to(device)
        groups = stored.shape[0]
        if groups > 1:  # runs of 64 columns, 8 x 8 transposed
            ordered = stored.view(groups, -1, 8, 8).transpose(2, 3)
        else:  # runs of 32 columns, pairs of every eighth
            ordered = stored.view(groups, -1, 4, 4, 2).transpose(2, 3)
        ordered = ordered.reshape(groups, -1)
        if end == self.spec.n and not bool(ordered[:, -1].any()):
            event(
                logger,
                logging.WARNING,
                "columns_of_zeros",
                module=self.spec.module,
                file=self.tensors[self._codes].path,
                last_column=end - 1,
                effect="some tools pad n; the results of padding are zeros",
            )
        return ordered

    def zeros(self, begin: int, end: int, device: torch.device) -> torch.Tensor | None:
        """See `AffineModule.zeros`."""
        return None
