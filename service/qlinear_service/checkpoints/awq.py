"""AWQ safetensors, version gemm: AutoAWQ, GPTQModel, AutoRound.

M.qweight  int32 [k, n / 8]       codes along n, in the order 0 2 4 6 1 3 5 7
M.qzeros   int32 [groups, n / 8]  zero points as they are, in the same order
M.scales   float [groups, n]
M.bias     float [n], optional

Groups are sequential, codes have 4 bits. Version marlin has the layout of marlin.py under these
names; gemv and gemv_fast have others, which are not loaded.
"""

from collections.abc import Iterator, Mapping

import torch

from qlinear_service.checkpoints.affine import AffineModule, expect_form
from qlinear_service.checkpoints.checkpoint import Module
from qlinear_service.checkpoints.grouping import sequential
from qlinear_service.checkpoints.opened import Opened
from qlinear_service.checkpoints.safetensors_file import FLOAT_CODES, TensorInfo
from qlinear_service.checkpoints.settings import Setting, Settings, read_settings
from qlinear_service.checkpoints.words import unpack_columns
from qlinear_service.errors import CheckpointError
from qlinear_service.layers import LayerSpec

__all__ = ["AwqModule", "describe", "read"]

_BITS = 4
_PER_WORD = 8
_MIDDLE = 8
_SLOT_OF = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which slot of its word each of eight columns lies."""


def describe(opened: Opened) -> str:
    """Return what was recognised, for people."""
    return f"AWQ ({opened.found.label}), {_settings(opened)}"


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
    assert config is not None, "without a configuration nothing is taken for AWQ"
    # Libraries write sym = true as a default beside it; zero_point is the truth.
    zero_point, sym = config.get("zero_point"), config.get("sym")
    for key, value in (("zero_point", zero_point), ("sym", sym)):
        if value is not None and not isinstance(value, bool):
            raise config.error(key, f"{key} is {value!r}; expected true or false")
    asymmetric = zero_point if zero_point is not None else sym is False
    # What is said to be symmetric has zero points in its file all the same: those decide.
    symmetric = False if asymmetric else None
    settings = read_settings(config, label=opened.found.label, method="awq", symmetric=symmetric)
    if settings.choices[0].bits != _BITS:
        bits = settings.choices[0].bits
        raise config.error("bits", f"bits is {bits}; AWQ checkpoints of 4 are loaded")
    return settings


def _module(
    opened: Opened, name: str, tensors: Mapping[str, TensorInfo], settings: Settings
) -> Module:
    qweight = expect_form(name, tensors, "qweight", dtypes=("I32",), meaning="[k, n / 8]")
    k, n = qweight.shape[0], qweight.shape[1] * _PER_WORD
    setting = _setting(name, tensors, settings, k)
    one = setting.group_size == -1 or setting.group_size >= k
    groups = 1 if one else -(-k // setting.group_size)
    because = (
        f"{name}.qweight {list(qweight.shape)} means k = {k} and n = {n}, and group_size is "
        f"{setting.group_size}"
    )
    forms = {
        "scales": (tuple(FLOAT_CODES), (groups, n), "[groups, n]"),
        "qzeros": (("I32",), (groups, qweight.shape[1]), "[groups, n / 8]"),
        "bias": (tuple(FLOAT_CODES), (n,), "[n]"),
    }
    for suffix, (dtypes, shape, meaning) in forms.items():
        if suffix != "bias" or suffix in tensors:
            expect_form(
                name, tensors, suffix, dtypes=dtypes, shape=shape, meaning=meaning, because=because
            )
    if "g_idx" in tensors:
        problem = "belongs to GPTQ, but the configuration says AWQ, which has no act-order"
        raise CheckpointError(tensors["g_idx"].path, problem, tensor=f"{name}.g_idx")
    try:
        grouping = sequential(k, setting.group_size)
    except ValueError as error:
        raise CheckpointError(qweight.path, str(error), tensor=name) from None
    symmetric = setting.symmetric
    if symmetric is None:
        stored = unpack_columns(opened.files.load(f"{name}.qzeros"), bits=_BITS)
        symmetric = bool((stored == _MIDDLE).all())
    spec = LayerSpec(
        model=opened.model,
        module=name,
        n=n,
        k=k,
        bits=_BITS,
        group_size=grouping.size,
        symmetric=symmetric,
        has_bias="bias" in tensors,
        scale_dtype=FLOAT_CODES[tensors["scales"].dtype],
        source=settings.source,
    )
    used = {s: tensors[s] for s in ("qweight", "qzeros", "scales", "bias") if s in tensors}
    return AwqModule(opened.files, used, spec, setting.group_size)


def _setting(name: str, tensors: Mapping[str, TensorInfo], settings: Settings, k: int) -> Setting:
    """Return the setting whose number of groups the scales have; the first where none fits."""
    shape = tensors["scales"].shape if "scales" in tensors else ()
    usable = [
        s for s in settings.choices if s.bits == _BITS and (s.group_size > 0 or s.group_size == -1)
    ]
    fitting = {
        k if s.group_size == -1 else min(s.group_size, k): s
        for s in reversed(usable)
        if shape and shape[0] == (1 if s.group_size == -1 else -(-k // s.group_size))
    }
    if len(fitting) > 1:
        raise CheckpointError(
            tensors["scales"].path, f"fits several of the group sizes ({settings})", tensor=name
        )
    return next(iter(fitting.values()), settings.choices[0])


class AwqModule(AffineModule):
    """One AWQ module; see the head of this file."""

    def codes(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """See `AffineModule.codes`."""
        return self._unpacked("qweight", begin, end, device)

    def scales(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """See `AffineModule.scales`."""
        return self.tensor("scales")[:, begin:end].to(device)

    def zeros(self, begin: int, end: int, device: torch.device) -> torch.Tensor | None:
        """See `AffineModule.zeros`."""
        return None if self.spec.symmetric else self._unpacked("qzeros", begin, end, device)

    def _unpacked(self, suffix: str, begin: int, end: int, device: torch.device) -> torch.Tensor:
        words = self.tensor(suffix)[:, begin // _PER_WORD : end // _PER_WORD].to(device)
        return unpack_columns(words, bits=_BITS, slot_of=_SLOT_OF)
