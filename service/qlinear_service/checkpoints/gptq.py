"""GPTQ safetensors, v1 and v2: AutoGPTQ, GPTQModel, AutoRound.

M.qweight  int32 [k * bits / 32, n]       codes along k, lowest bits first
M.qzeros   int32 [groups, n * bits / 32]  zero points along n: minus one in v1, as they are in v2
M.scales   float [groups, n]
M.g_idx    int32 [k], optional            group of each input feature; absent: sequential
M.bias     float [n], optional
"""

import logging
from collections.abc import Iterator, Mapping

import torch

from qlinear_service.checkpoints.affine import AffineModule, expect_form
from qlinear_service.checkpoints.checkpoint import Module
from qlinear_service.checkpoints.grouping import Grouping, by_index, check_groups, sequential
from qlinear_service.checkpoints.opened import Opened
from qlinear_service.checkpoints.safetensors_file import FLOAT_CODES, TensorInfo
from qlinear_service.checkpoints.settings import Setting, Settings, read_settings
from qlinear_service.checkpoints.tensor_files import TensorFiles
from qlinear_service.checkpoints.words import unpack_columns, unpack_rows
from qlinear_service.checkpoints.zero_points import ZeroPoints
from qlinear_service.errors import CheckpointError
from qlinear_service.layers import LayerSpec

__all__ = ["GptqModule", "describe", "read"]

logger = logging.getLogger(__name__)


def describe(opened: Opened) -> str:
    """Return what was recognised, for people."""
    return f"GPTQ ({opened.found.label}), {_settings(opened)}"


def read(opened: Opened) -> Iterator[Module]:
    """Yield the quantized modules, every dtype and shape compared with the settings.

    Raises:
        CheckpointError: the configuration or a module cannot be used.
    """
    settings = _settings(opened)
    for name, tensors in opened.modules.items():
        if "qweight" in tensors:
            yield _module(opened, name, tensors, settings)


def _settings(opened: Opened) -> Settings:
    config = opened.config
    assert config is not None, "without a configuration nothing is taken for GPTQ"
    symmetric = config.get("sym")
    if symmetric is not None and not isinstance(symmetric, bool):
        raise config.error("sym", f"sym is {symmetric!r}; expected true or false")
    return read_settings(config, label=opened.found.label, method="gptq", symmetric=symmetric)


def _module(
    opened: Opened, name: str, tensors: Mapping[str, TensorInfo], settings: Settings
) -> Module:
    found = _fitting(name, tensors, settings)
    setting, qweight = found[0], tensors["qweight"]
    k, n = qweight.shape[0] * 32 // setting.bits, qweight.shape[1]
    claims = {choice.symmetric for choice in found}
    minus_one = opened.found.label != "gptq_v2"
    word_wise = "gptqmodel" in settings.quantizer.lower()
    zero_points = ZeroPoints(setting.bits, minus_one=minus_one, word_wise=word_wise)
    used = {s: tensors[s] for s in ("qweight", "qzeros", "scales", "g_idx", "bias") if s in tensors}
    groups = used["scales"].shape[0]
    if "g_idx" not in tensors and settings.ordered and groups > 1:
        raise CheckpointError(
            tensors["qweight"].path,
            f"is missing beside {name}.qweight, but desc_act is true: without it nobody knows "
            "which input features share a scale; download the folder again",
            tensor=f"{name}.g_idx",
        )
    grouping = _grouping(opened.files, name, tensors, k, found, groups=groups)
    symmetric = claims.pop() if len(claims) == 1 else None
    if symmetric is None:
        stored = unpack_columns(opened.files.load(f"{name}.qzeros"), bits=setting.bits)[:, :n]
        symmetric = zero_points.all_middle(stored)
    spec = LayerSpec(
        model=opened.model,
        module=name,
        n=n,
        k=k,
        bits=setting.bits,
        group_size=grouping.size,
        symmetric=symmetric,
        has_bias="bias" in used,
        has_k_permutation=grouping.order is not None,
        scale_dtype=FLOAT_CODES[used["scales"].dtype],
        source=settings.source,
    )
    return GptqModule(opened.files, used, spec, zero_points, setting.group_size)


def _fitting(name: str, tensors: Mapping[str, TensorInfo], settings: Settings) -> list[Setting]:
    """Return the settings that a module's shapes agree with, at least one."""
    found: list[Setting] = []
    first: CheckpointError | None = None
    for setting in settings.choices:
        try:
            _check(name, tensors, setting)
        except CheckpointError as error:
            first = first or error
        else:
            found.append(setting)
    if found:
        return found
    assert first is not None
    if len(settings.choices) == 1:
        raise first
    raise CheckpointError(
        tensors["qweight"].path,
        f"fits none of the settings of the configuration ({settings}); by the first of them, "
        f"{first.tensor} {first.problem}",
        tensor=name,
    )


def _check(name: str, tensors: Mapping[str, TensorInfo], setting: Setting) -> None:
    """Compare every dtype and shape of a module with a setting."""
    qweight = expect_form(
        name, tensors, "qweight", dtypes=("I32",), meaning=f"[k * {setting.bits} / 32, n]"
    )
    if setting.bits not in (4, 8) or setting.group_size < -1 or setting.group_size == 0:
        raise CheckpointError(qweight.path, f"is said to have {setting}", tensor=name)
    per_word = 32 // setting.bits
    k, n = qweight.shape[0] * per_word, qweight.shape[1]
    one = setting.group_size == -1 or setting.group_size >= k
    groups = 1 if one else -(-k // setting.group_size)
    because = (
        f"{name}.qweight {list(qweight.shape)} with {setting.bits} bits means k = {k} and n = {n}, "
        f"and group_size is {setting.group_size}"
    )
    forms = {
        "g_idx": (("I32",), (k,), "[k]"),
        "scales": (tuple(FLOAT_CODES), (groups, n), "[groups, n]"),
        "qzeros": (("I32",), (groups, -(-n // per_word)), f"[groups, n / {per_word}]"),
        "bias": (tuple(FLOAT_CODES), (n,), "[n]"),
    }
    for suffix, (dtypes, shape, meaning) in forms.items():
        if suffix in tensors or suffix in ("scales", "qzeros"):
            expect_form(
                name, tensors, suffix, dtypes=dtypes, shape=shape, meaning=meaning, because=because
            )


def _grouping(
    files: TensorFiles,
    name: str,
    tensors: Mapping[str, TensorInfo],
    k: int,
    found: list[Setting],
    *,
    groups: int,
) -> Grouping:
    setting, path = found[0], tensors["qweight"].path
    try:
        if "g_idx" not in tensors:
            arranged = {_first_groups(k, choice.group_size) for choice in found}
            if len(arranged) > 1:
                raise ValueError(f"fits several group sizes ({'; '.join(map(str, found))})")
            return sequential(k, setting.group_size)
        index = files.load(f"{name}.g_idx")
        try:
            check_groups(index, groups, "g_idx")
        except ValueError:
            path, name = tensors["g_idx"].path, f"{name}.g_idx"
            raise
        return by_index(index, setting.group_size, groups)
    except ValueError as error:
        raise CheckpointError(path, str(error), tensor=name) from None


def _first_groups(k: int, group_size: int) -> int:
    """Return what tells sequential arrangements of the same number of groups apart."""
    return k if group_size == -1 else min(group_size, k)


class GptqModule(AffineModule):
    """One GPTQ module; see the head of this file."""

    def __init__(
        self,
        files: TensorFiles,
        tensors: Mapping[str, TensorInfo],
        spec: LayerSpec,
        zero_points: ZeroPoints,
        group_size: int,
    ) -> None:
        super().__init__(files, tensors, spec, group_size)
        self._zero_points = zero_points

    def codes(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """See `AffineModule.codes`."""
        words = self.tensor("qweight")[:, begin:end].to(device)
        return unpack_rows(words, bits=self.spec.bits)

    def scales(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """See `AffineModule.scales`."""
        return self.tensor("scales")[:, begin:end].to(device)

    def zeros(self, begin: int, end: int, device: torch.device) -> torch.Tensor | None:
        """See `AffineModule.zeros`."""
        if self.spec.symmetric:
            if begin == 0:  # once for the whole layer
                self._zero_points.check_symmetric(self)
            return None
        per_word = 32 // self.spec.bits
        words = self.tensor("qzeros")[:, begin // per_word : -(-end // per_word)]
        return self._zero_points.decoded(self, words, begin, end).to(device)

    def grouping(self) -> Grouping:
        """See `AffineModule.grouping`."""
        if "g_idx" in self.tensors:
            groups = self.tensors["scales"].shape[0]
            return by_index(self.tensor("g_idx"), self._group_size, groups)
        return super().grouping()
