"""compressed-tensors, format pack-quantized: llm-compressor and others.

M.weight_packed      int32 [n, k * bits / 32]   codes along k, plus half their range
M.weight_scale       float [n, groups]; [n, 1] for one a row, [1] for one in all
M.weight_zero_point  int32 [n * bits / 32, groups], along n, plus half the range;
                     or int8 [n, groups], as they are
M.weight_shape       int [2]                    n and k
M.weight_g_idx       int32 [k], optional        group of each input feature (act-order)
M.bias               float [n], optional

The tensors tell bits, groups and symmetry; the configuration must agree.
"""

from collections.abc import Iterator, Mapping

import torch

from qlinear_service.checkpoints.affine import AffineModule, expect_form
from qlinear_service.checkpoints.checkpoint import Module
from qlinear_service.checkpoints.compressed_settings import Scheme, read_schemes
from qlinear_service.checkpoints.grouping import Grouping, by_index, check_groups, sequential
from qlinear_service.checkpoints.opened import Opened
from qlinear_service.checkpoints.safetensors_file import FLOAT_CODES, TensorInfo
from qlinear_service.checkpoints.tensor_files import TensorFiles
from qlinear_service.checkpoints.words import unpack_rows
from qlinear_service.errors import CheckpointError
from qlinear_service.layers import LayerSpec, Source

__all__ = ["CompressedModule", "describe", "read"]

_SUFFIXES = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "bias",
)  # fmt: skip
_BITS = (4, 8)


def describe(opened: Opened) -> str:
    """Return what was recognised, for people."""
    schemes = "; ".join(map(str, read_schemes(opened.config))) or "as its tensors say"
    return f"compressed-tensors ({opened.found.label}), {schemes}"


def read(opened: Opened) -> Iterator[Module]:
    """Yield the quantized modules, every dtype and shape compared with the settings.

    Raises:
        CheckpointError: the configuration or a module cannot be used.
    """
    schemes = read_schemes(opened.config)
    for name, tensors in opened.modules.items():
        if "weight_packed" in tensors:
            yield _module(opened, name, tensors, schemes)


def _module(
    opened: Opened, name: str, tensors: Mapping[str, TensorInfo], schemes: tuple[Scheme, ...]
) -> Module:
    n, k, bits = _sizes(opened.files, name, tensors, schemes)
    groups = _groups(name, tensors, n, k)
    asymmetric = _asymmetric(opened.files, name, tensors, n, groups, bits)
    symmetric = not asymmetric
    group_size = -1 if groups == 1 else -(-k // groups)
    _check_schemes(name, tensors, schemes, bits, groups, k, asymmetric=asymmetric)
    try:
        grouping = _grouping(opened.files, name, tensors, k, groups, group_size)
    except ValueError as error:
        raise CheckpointError(tensors["weight_packed"].path, str(error), tensor=name) from None
    if "bias" in tensors:
        expect_form(
            name, tensors, "bias", dtypes=tuple(FLOAT_CODES), shape=(n,), meaning="[n]",
            because=f"{name}.weight_shape says n = {n}",
        )  # fmt: skip
    spec = LayerSpec(
        model=opened.model,
        module=name,
        n=n,
        k=k,
        bits=bits,
        group_size=grouping.size,
        symmetric=symmetric,
        has_bias="bias" in tensors,
        has_k_permutation=grouping.order is not None,
        scale_dtype=FLOAT_CODES[tensors["weight_scale"].dtype],
        source=Source(tool=_tool(opened), format="pack-quantized"),
    )
    used = {suffix: tensors[suffix] for suffix in _SUFFIXES if suffix in tensors}
    return CompressedModule(opened.files, used, spec, group_size)


def _tool(opened: Opened) -> str:
    version = opened.config.get("version") if opened.config else None
    return f"compressed-tensors:{version}" if isinstance(version, str) else "compressed-tensors"


def _sizes(
    files: TensorFiles, name: str, tensors: Mapping[str, TensorInfo], schemes: tuple[Scheme, ...]
) -> tuple[int, int, int]:
    """Return n, k and bits."""
    packed = expect_form(
        name, tensors, "weight_packed", dtypes=("I32",), meaning="[n, k * bits / 32]"
    )
    expect_form(
        name, tensors, "weight_shape", dtypes=("I64", "I32"), shape=(2,), meaning="[2]",
        because="it holds n and k",
    )  # fmt: skip
    n, k = (int(size) for size in files.load(f"{name}.weight_shape"))
    allowed = [scheme.bits for scheme in schemes] or _BITS
    fitting = [
        bits
        for bits in _BITS
        if bits in allowed and packed.shape == (n, -(-k * bits // 32)) and k > 0
    ]
    if not fitting:
        raise CheckpointError(
            tensors["weight_shape"].path,
            f"says [{n}, {k}], which with {' or '.join(map(str, dict.fromkeys(allowed)))} bits "
            f"does not match {name}.weight_packed {list(packed.shape)}",
            tensor=f"{name}.weight_shape",
        )
    return n, k, fitting[0]


def _groups(name: str, tensors: Mapping[str, TensorInfo], n: int, k: int) -> int:
    """Return the number of stored groups along k, after checking the scales' form."""
    info, floats = tensors.get("weight_scale"), tuple(FLOAT_CODES)
    because = f"{name}.weight_shape says n = {n} and k = {k}"
    if info is not None and info.shape == (1,):
        expect_form(
            name, tensors, "weight_scale", dtypes=floats, shape=(1,), meaning="[1]", because=because
        )
        return 1
    groups = info.shape[1] if info is not None and len(info.shape) == 2 else 1
    # A last group that ends short is not written by the tools, and k / groups would be a guess.
    divides = groups > 0 and k % groups == 0
    if info is not None and "weight_g_idx" not in tensors and not divides:
        raise CheckpointError(
            info.path,
            f"has shape {list(info.shape)}; expected a number of groups that divides k = {k}",
            tensor=f"{name}.weight_scale",
        )
    expect_form(
        name, tensors, "weight_scale", dtypes=floats, shape=(n, max(groups, 1)),
        meaning="[n, groups]", because=because,
    )  # fmt: skip
    return groups


def _check_schemes(
    name: str,
    tensors: Mapping[str, TensorInfo],
    schemes: tuple[Scheme, ...],
    bits: int,
    groups: int,
    k: int,
    *,
    asymmetric: bool,
) -> None:
    """Refuse a module that none of the configuration's groups describes."""
    # Zero points that are all in the middle change nothing, whatever the configuration says.
    silent = "weight_zero_point" in tensors and not asymmetric
    kinds = (True, False) if silent else (not asymmetric,)
    listed = "weight_g_idx" in tensors
    if not schemes or any(
        scheme.describes(bits, groups, k, symmetric=kind, listed=listed)
        for scheme in schemes
        for kind in kinds
    ):
        return
    sizes = f"{groups} groups" if listed or groups == 1 else f"{groups} groups of {k // groups}"
    zero_points = "with" if asymmetric else "without"
    order = "with" if listed else "without"
    raise CheckpointError(
        tensors["weight_packed"].path,
        f"has {bits} bits, {sizes} along k = {k}, {zero_points} weight_zero_point, {order} "
        f"weight_g_idx, but the configuration has {'; '.join(map(str, schemes))}; the file or its "
        "config.json is wrong",
        tensor=name,
    )


def _asymmetric(
    files: TensorFiles,
    name: str,
    tensors: Mapping[str, TensorInfo],
    n: int,
    groups: int,
    bits: int,
) -> bool:
    """Say whether a zero point is not in the middle, after checking form and range of all."""
    info = tensors.get("weight_zero_point")
    if info is None:
        return False
    packed = info.dtype == "I32" and len(info.shape) == 2
    one = tensors["weight_scale"].shape == (1,)
    shape = (1,) if one else (-(-n * bits // 32) if packed else n, groups)
    expect_form(
        name, tensors, "weight_zero_point", dtypes=("I32", "I8"), shape=shape,
        meaning="[n * bits / 32, groups]" if packed else "[n, groups]",
        because=f"{name}.weight_shape says n = {n}, and weight_scale has {groups} groups",
    )  # fmt: skip
    stored = files.load(f"{name}.weight_zero_point")
    half = 1 << (bits - 1)
    if not packed:
        wide = stored.int()  # 128 is no int8
        beyond = (wide < -half) | (wide >= half)
        if bool(beyond.any()):
            raise CheckpointError(
                info.path,
                f"holds {int(stored[beyond][0])}; expected {-half} .. {half - 1}",
                tensor=f"{name}.weight_zero_point",
            )
    return not bool((_zero_points(stored, n, bits) == half).all())


def _zero_points(stored: torch.Tensor, n: int, bits: int) -> torch.Tensor:
    """Return zero points in the unsigned range of the codes, uint8 [n or 1, groups]."""
    if stored.dim() == 2 and stored.dtype == torch.int32:
        return unpack_rows(stored, bits=bits)[:n]
    half = 1 << (bits - 1)
    return (stored.to(torch.int16).view(-1, stored.shape[-1]) + half).to(torch.uint8)


def _grouping(
    files: TensorFiles,
    name: str,
    tensors: Mapping[str, TensorInfo],
    k: int,
    groups: int,
    group_size: int,
) -> Grouping:
    if "weight_g_idx" not in tensors:
        return sequential(k, group_size)
    expect_form(
        name, tensors, "weight_g_idx", dtypes=("I32",), shape=(k,), meaning="[k]",
        because=f"{name}.weight_shape says k = {k}",
    )  # fmt: skip
    index = files.load(f"{name}.weight_g_idx")
    if bool((index == -1).all()):  # what some tools write where there is no act-order
        return sequential(k, group_size)
    check_groups(index, groups, "weight_g_idx")
    return by_index(index, group_size, groups)


class CompressedModule(AffineModule):
    """One module of a pack-quantized checkpoint; see the head of this file."""

    scales_suffix = "weight_scale"

    def codes(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """See `AffineModule.codes`."""
        words = self.tensor("weight_packed")[begin:end].to(device)
        # Transposed as words: eight times fewer elements than codes.
        return unpack_rows(words.T, bits=self.spec.bits)[: self.spec.k]

    def scales(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """See `AffineModule.scales`."""
        stored = self.tensor("weight_scale")
        if stored.dim() == 1:  # one for the whole layer
            return stored.to(device).expand(1, end - begin).contiguous()
        return stored[begin:end].T.contiguous().to(device)

    def zeros(self, begin: int, end: int, device: torch.device) -> torch.Tensor | None:
        """See `AffineModule.zeros`."""
        if self.spec.symmetric:
            return None
        stored, bits = self.tensor("weight_zero_point"), self.spec.bits
        if stored.dim() == 1:  # one for the whole layer
            return _zero_points(stored, 1, bits).expand(1, end - begin).to(device)
        per_row = 32 // bits if stored.dtype == torch.int32 else 1
        rows = stored[begin // per_row : -(-end // per_row)]
        return _zero_points(rows, end - begin, bits).T.contiguous().to(device)

    def grouping(self) -> Grouping:
        """See `AffineModule.grouping`."""
        groups = self.tensors["weight_scale"].shape[-1]
        name, k = self.spec.module, self.spec.k
        return _grouping(self.files, name, self.tensors, k, groups, self._group_size)
