"""The text part of a packed file: what each layer is, which tensors it has, and their checksums.

Everything stands in one JSON text, kept in the safetensors metadata beside a checksum of itself,
so that a flipped bit in a description is seen as surely as one in a weight.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from qlinear_service.checkpoints import strict_json
from qlinear_service.dtypes import DType
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels import layout
from qlinear_service.layers import UNQUANTIZED_BITS, LayerSpec, Source

__all__ = [
    "FORMAT_KEY",
    "Contents",
    "StoredLayer",
    "expected_tensors",
    "pack_again",
    "parse_metadata",
    "render_metadata",
]

T = TypeVar("T")

FORMAT_KEY = "qlinear.format"
_FORMAT = "packed"
_VERSION_KEY = "qlinear.layout_version"
_MODEL_KEY = "qlinear.model"
_LAYERS_KEY = "qlinear.layers"
_CHECKSUM_KEY = "qlinear.layers_xxh3"

_DTYPE_CODES = {DType.F16: "F16", DType.BF16: "BF16", DType.F32: "F32"}
_MAX_SIZE = 1 << 31  # of n and k: far beyond any layer, and products still fit 64 bits


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One layer as the file describes it."""

    spec: LayerSpec
    xxh3: Mapping[str, str]
    """xxh3-128 of each tensor's bytes in hexadecimal, by suffix."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything that a packed file says about itself."""

    model: str
    layers: Mapping[str, StoredLayer]
    """By module, in file order."""


def expected_tensors(spec: LayerSpec) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Return the tensors of a layer by suffix: allowed safetensors dtypes, and shape.

    Every size is a multiple of 64 bytes, so that in a file that starts aligned every tensor does:
    that is why `k_permutation` is stored up to k_padded.
    """
    blocks, k_tiles = spec.n_padded // layout.TILE_N, spec.k_padded // layout.TILE_K
    columns = (blocks, spec.groups, layout.TILE_N)
    dtype = (_DTYPE_CODES[spec.scale_dtype],)
    tensors: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}
    if spec.quantized:
        tensors["qweight"] = (("U8",), (blocks, k_tiles, layout.tile_bytes(spec.bits)))
        tensors["scales"] = (dtype, columns)
    else:
        tensors["weight"] = (dtype, (spec.n_padded, spec.k))
    if not spec.symmetric:
        tensors["zeros"] = (("U8",), columns)
    if spec.has_bias:
        tensors["bias"] = (tuple(_DTYPE_CODES.values()), (spec.n_padded,))
    if spec.has_k_permutation:
        tensors["k_permutation"] = (("I32",), (spec.k_padded,))
    return tensors


def render_metadata(model: str, layers: Sequence[StoredLayer]) -> dict[str, str]:
    """Return the `__metadata__` of a packed file."""
    described = {layer.spec.module: _describe(layer) for layer in layers}
    text = json.dumps({"model": model, "layers": described}, separators=(",", ":"))
    return {
        FORMAT_KEY: _FORMAT,
        _VERSION_KEY: str(layout.VERSION),
        _MODEL_KEY: model,
        _LAYERS_KEY: text,
        _CHECKSUM_KEY: xxhash.xxh3_128_hexdigest(text.encode()),
    }


def _describe(layer: StoredLayer) -> dict[str, Any]:
    spec = layer.spec
    return {
        "n": spec.n,
        "k": spec.k,
        "bits": spec.bits,
        "group_size": spec.group_size,
        "symmetric": spec.symmetric,
        "has_bias": spec.has_bias,
        "has_k_permutation": spec.has_k_permutation,
        "scale_dtype": spec.scale_dtype.text,
        "zero_encoding": _zero_encoding(symmetric=spec.symmetric),
        "source": {
            "tool": spec.source.tool,
            "format": spec.source.format,
            "method": spec.source.method,
        },
        "xxh3": dict(layer.xxh3),
    }


def _zero_encoding(*, symmetric: bool) -> str:
    return "none" if symmetric else "u8"


def parse_metadata(metadata: Mapping[str, str], path: Path) -> Contents:
    """Return what the metadata of the packed file at `path` says.

    Raises:
        CheckpointError: it is no packed file, has another layout version, or is damaged.
    """
    if metadata.get(FORMAT_KEY) != _FORMAT:
        raise CheckpointError(
            path,
            f"is a safetensors file but not a packed one ({FORMAT_KEY} is "
            f"{metadata.get(FORMAT_KEY)!r}, expected {_FORMAT!r}); "
            f"pack a checkpoint with: qlinear pack CHECKPOINT_FOLDER -o FILE",
        )
    version = metadata.get(_VERSION_KEY)
    if version != str(layout.VERSION):
        raise CheckpointError(
            path,
            f"has layout version {version!r} and this program reads {str(layout.VERSION)!r}; "
            + pack_again(path),
        )
    text = metadata.get(_LAYERS_KEY, "")
    found = xxhash.xxh3_128_hexdigest(text.encode())
    if found != metadata.get(_CHECKSUM_KEY):
        raise CheckpointError(
            path,
            f"its {_LAYERS_KEY} has checksum {found}, expected {metadata.get(_CHECKSUM_KEY)}; the "
            "file is damaged: copy or pack it again",
        )
    content = strict_json.parse_object(text.encode(), path)
    model, described = content.get("model"), content.get("layers")
    if not isinstance(model, str) or model != metadata.get(_MODEL_KEY):
        raise CheckpointError(
            path, f"names its model {model!r} and {metadata.get(_MODEL_KEY)!r}; expected one name"
        )
    if not isinstance(described, dict) or not described:
        raise CheckpointError(path, "describes no layers; expected at least one")
    layers = {module: _parse_layer(model, module, d, path) for module, d in described.items()}
    return Contents(model, layers)


def pack_again(path: Path) -> str:
    """Return the end of a sentence: that the file must be packed again, and with which command."""
    return (
        "pack the checkpoint again with: "
        f"qlinear pack CHECKPOINT_FOLDER -o {shlex.quote(str(path))} --force"
    )


def _parse_layer(model: str, module: str, described: Any, path: Path) -> StoredLayer:
    """Return one layer; the text is intact, but may have been written by something else."""
    try:
        source = Source(**{key: _typed(value, str) for key, value in described["source"].items()})
        spec = LayerSpec(
            model=model,
            module=module,
            n=_size(described["n"]),
            k=_size(described["k"]),
            bits=_one_of(described["bits"], (*layout.BITS, UNQUANTIZED_BITS)),
            group_size=_one_of(described["group_size"], layout.GROUP_SIZES),
            symmetric=_typed(described["symmetric"], bool),
            has_bias=_typed(described["has_bias"], bool),
            has_k_permutation=_typed(described["has_k_permutation"], bool),
            scale_dtype=DType.from_text(described["scale_dtype"]),
            source=source,
        )
        if not spec.quantized and (spec.group_size, spec.has_k_permutation) != (-1, False):
            raise ValueError("a layer of 16 bits has no groups and no permutation")
        if not spec.quantized and not spec.symmetric:
            raise ValueError("a layer of 16 bits has no zero points")
        _one_of(described["zero_encoding"], (_zero_encoding(symmetric=spec.symmetric),))
        xxh3 = {suffix: _typed(described["xxh3"][suffix], str) for suffix in expected_tensors(spec)}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            path, f"its description cannot be used ({error}); " + pack_again(path),
            tensor=module,
        ) from None  # fmt: skip
    return StoredLayer(spec, xxh3)


def _typed(value: object, kind: type[T]) -> T:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _size(value: object) -> int:
    size = _typed(value, int)
    if not 1 <= size <= _MAX_SIZE:
        raise ValueError(f"size {size} is not in 1 .. {_MAX_SIZE}")
    return size


def _one_of(value: T, allowed: tuple[T, ...]) -> T:
    if value not in allowed:
        raise ValueError(f"{value!r} is none of {allowed}")
    return allowed[allowed.index(value)]  # 4.0 equals 4 but is none
