"""Which tensors form a GPTQ module, and the sizes on which they have to agree.

Works on names, dtypes and shapes alone, so that a whole checkpoint is judged from its headers.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass

from qlinear_service.checkpoints.checkpoint import Skipped
from qlinear_service.checkpoints.gptq_settings import GptqSettings
from qlinear_service.checkpoints.safetensors_file import FLOAT_CODES, TensorInfo
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels import layout
from qlinear_service.log_values import quoted

__all__ = ["GptqModule", "group_by_module", "measured_module", "natural_order", "skipped_tensors"]

logger = logging.getLogger(__name__)

_REQUIRED = ("qweight", "qzeros", "scales")
_OPTIONAL = ("g_idx", "bias")
# A tensor with one of these names belongs to a quantized module and to nothing else.
_ONLY_BESIDE_QWEIGHT = ("qzeros", "g_idx")


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqModule:
    """One quantized module whose tensors agree with each other."""

    name: str
    tensors: dict[str, TensorInfo]
    """By suffix: the required ones and the optional ones that exist."""
    k: int
    n: int
    groups: int
    group_size: int
    """-1, 32, 64 or 128."""


def group_by_module(tensors: dict[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors by module and suffix, modules in natural order."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in sorted(tensors.items()):
        module, _, suffix = name.rpartition(".")
        if not module and suffix == "qweight":
            raise CheckpointError(info.path, "belongs to no module", tensor=name)
        modules.setdefault(module, {})[suffix] = info
    return dict(sorted(modules.items(), key=lambda item: natural_order(item[0])))


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    parts: list[str] = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def skipped_tensors(modules: dict[str, dict[str, TensorInfo]]) -> Iterator[Skipped]:
    """Yield every tensor that is not part of a quantized module.

    Raises:
        CheckpointError: a part of a quantized module has no qweight beside it.
    """
    for module, tensors in modules.items():
        for suffix, info in tensors.items():
            name = f"{module}.{suffix}" if module else suffix
            if "qweight" in tensors:
                if suffix not in _REQUIRED + _OPTIONAL:
                    logger.warning("tensor_ignored tensor=%s reason=foreign", quoted(name))
                    yield Skipped(name, f"{info}: not part of the GPTQ format, ignored")
            elif suffix in _ONLY_BESIDE_QWEIGHT:
                raise CheckpointError(
                    info.path, f"has no {module}.qweight beside it; the file is incomplete",
                    tensor=name,
                )  # fmt: skip
            else:
                yield Skipped(name, f"{info}: {_kind(module, suffix, info)}")


def _kind(module: str, suffix: str, info: TensorInfo) -> str:
    if suffix == "weight" and len(info.shape) == 2:
        last = module.rpartition(".")[2]
        embeds = "embed" in last or last in ("wte", "wpe")
        return "embedding table" if embeds else "not quantized in the checkpoint"
    return "no quantized weight (norm, bias or buffer)"


def measured_module(
    name: str, tensors: dict[str, TensorInfo], settings: GptqSettings
) -> GptqModule:
    """Return the module with its sizes after comparing every dtype and shape with them.

    Raises:
        CheckpointError: a tensor is missing, or its dtype or shape contradicts the others.
    """
    _check_complete(name, tensors)
    used = {suffix: tensors[suffix] for suffix in _REQUIRED + _OPTIONAL if suffix in tensors}
    qweight = used["qweight"]
    if len(qweight.shape) != 2 or 0 in qweight.shape:
        raise CheckpointError(
            qweight.path,
            f"has shape {list(qweight.shape)}; expected [k / 8, n], both at least 1",
            tensor=f"{name}.qweight",
        )
    k, n = qweight.shape[0] * settings.codes_per_word, qweight.shape[1]
    one_group = settings.group_size == -1 or settings.group_size >= k
    groups = 1 if one_group else -(-k // settings.group_size)
    expected = {
        "g_idx": ([k], "k"),
        "scales": ([groups, n], "groups, n"),
        "qzeros": ([groups, -(-n // settings.codes_per_word)], "groups, n / 8"),
        "bias": ([n], "n"),
    }
    for suffix, (shape, meaning) in expected.items():
        if suffix in used and list(used[suffix].shape) != shape:
            raise CheckpointError(
                used[suffix].path,
                f"has shape {list(used[suffix].shape)}; expected {shape} = [{meaning}], because "
                f"{name}.qweight {list(qweight.shape)} means k = {k} and n = {n}, and group_size "
                f"is {settings.group_size}",
                tensor=f"{name}.{suffix}",
            )
    group_size = settings.group_size
    if one_group and group_size not in layout.GROUP_SIZES:
        group_size = -1
    if group_size not in layout.GROUP_SIZES:
        raise CheckpointError(
            qweight.path,
            f"has group_size {group_size}; this version loads 32, 64, 128 and one group for all "
            f"of k = {k}: quantize with one of these",
            tensor=name,
        )
    return GptqModule(name=name, tensors=used, k=k, n=n, groups=groups, group_size=group_size)


def _check_complete(name: str, tensors: dict[str, TensorInfo]) -> None:
    for suffix in _REQUIRED:
        if suffix not in tensors:
            raise CheckpointError(
                tensors["qweight"].path,
                f"is missing beside {name}.qweight; a GPTQ module has {', '.join(_REQUIRED)}",
                tensor=f"{name}.{suffix}",
            )
    if "weight" in tensors:
        raise CheckpointError(
            tensors["weight"].path,
            "stands beside a qweight of the same module; expected one of the two",
            tensor=f"{name}.weight",
        )
    for suffix, info in tensors.items():
        allowed = tuple(FLOAT_CODES) if suffix in ("scales", "bias") else ("I32",)
        if suffix in _REQUIRED + _OPTIONAL and info.dtype not in allowed:
            raise CheckpointError(
                info.path,
                f"has dtype {info.dtype}; expected {' or '.join(allowed)}",
                tensor=f"{name}.{suffix}",
            )
