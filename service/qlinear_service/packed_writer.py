"""Writes packed files: one layer at a time, all of the file or nothing.

The header comes first and holds checksums, so room is left for it and it is written last.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import xxhash

from qlinear_service.errors import CheckpointError
from qlinear_service.kernels import layout
from qlinear_service.layers import LayerSpec, QuantizedLinear
from qlinear_service.packed_metadata import StoredLayer, expected_tensors, render_metadata
from qlinear_service.partial_file import Flusher, replacing

__all__ = ["planned_bytes", "write_packed"]

_LENGTH_BYTES = 8
_ITEM_BYTES = {"U8": 1, "F16": 2, "BF16": 2, "I32": 4, "F32": 4}
_TORCH_CODES = {
    torch.uint8: "U8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int32: "I32",
}


def planned_bytes(specs: Iterable[LayerSpec]) -> int:
    """Return an upper bound of the tensor bytes of such layers; only a bias may be narrower."""
    return sum(_worst_bytes(spec, suffix) for spec in specs for suffix in expected_tensors(spec))


def _worst_bytes(spec: LayerSpec, suffix: str) -> int:
    dtypes, shape = expected_tensors(spec)[suffix]
    size = max(_ITEM_BYTES[dtype] for dtype in dtypes)
    for length in shape:
        size *= length
    return size


def write_packed(
    path: Path,
    model_name: str,
    layers: Iterable[QuantizedLinear],
    *,
    specs: Sequence[LayerSpec],
    progress: Callable[[int], None] = lambda written: None,
) -> None:
    """Write a packed file, all of it or nothing.

    Args:
        path: the file; one that exists is replaced in a single step at the very end.
        model_name: name of the model; every spec carries it.
        layers: taken one at a time, in the order of `specs`.
        specs: what `layers` will yield; known up front because the header comes first.
        progress: called with the bytes just written.

    Raises:
        CheckpointError: the file cannot be written.
        ValueError: `layers` does not yield what `specs` says.
    """
    try:
        with replacing(path) as file, Flusher(file) as flusher:

            def wrote(nbytes: int) -> None:
                flusher.wrote(nbytes)
                progress(nbytes)

            _write(file, model_name, layers, specs=specs, progress=wrote)
            flusher.finish()
    except OSError as error:
        raise CheckpointError(path, f"cannot be written: {error.strerror or error}") from None


def _write(
    file: IO[bytes],
    model_name: str,
    layers: Iterable[QuantizedLinear],
    *,
    specs: Sequence[LayerSpec],
    progress: Callable[[int], None],
) -> None:
    if len({spec.module for spec in specs}) != len(specs):
        raise ValueError("two layers have the same module name")
    reserved = _reserved_header_bytes(model_name, specs)
    file.seek(_LENGTH_BYTES + reserved)
    writer = _Writer(file, progress)
    remaining = iter(layers)
    stored = [writer.write(spec, _next(remaining, spec), model_name) for spec in specs]
    if next(remaining, None) is not None:
        raise ValueError("there are more layers than specs")
    header = _header(render_metadata(model_name, stored), writer.entries)
    assert len(header) <= reserved, "the header would run into the first tensor"
    file.seek(0)
    file.write(reserved.to_bytes(_LENGTH_BYTES, "little"))
    file.write(header.ljust(reserved))


def _next(remaining: Iterator[QuantizedLinear], spec: LayerSpec) -> QuantizedLinear:
    layer = next(remaining, None)
    if layer is None:
        raise ValueError(f"there is no layer for {spec}")
    return layer


class _Writer:
    """Writes tensors one behind the other; keeps no layer, so that the next one finds room."""

    def __init__(self, file: IO[bytes], progress: Callable[[int], None]) -> None:
        self._file, self._progress = file, progress
        self._offset = 0
        self.entries: dict[str, Any] = {}

    def write(self, spec: LayerSpec, layer: QuantizedLinear, model_name: str) -> StoredLayer:
        """Write the tensors of one layer, and return what the header must say of it."""
        if layer.spec != spec or spec.model != model_name:
            raise ValueError(f"expected layer {spec}, model {model_name!r}; got {layer.spec}")
        checksums: dict[str, str] = {}
        for suffix, tensor in _tensors(layer).items():
            content = _content(tensor)
            checksums[suffix] = xxhash.xxh3_128_hexdigest(content)
            self.entries[f"{spec.module}.{suffix}"] = _entry(tensor, self._offset)
            self._offset += self._file.write(content)
            self._progress(content.nbytes)
        return StoredLayer(spec, checksums)


def _tensors(layer: QuantizedLinear) -> dict[str, torch.Tensor]:
    """Return the layer's tensors as they are stored, checked against its spec."""
    spec = layer.spec
    result: dict[str, torch.Tensor] = {}
    for suffix, (dtypes, shape) in expected_tensors(spec).items():
        tensor = getattr(layer, "qweight" if suffix == "weight" else suffix)
        if tensor is not None and suffix == "k_permutation":
            # Padding that maps to itself keeps the stored tensor a permutation, and aligned.
            rest = torch.arange(spec.k, spec.k_padded, dtype=tensor.dtype)
            tensor = torch.cat((tensor, rest))
        found = None if tensor is None else (_TORCH_CODES.get(tensor.dtype), tuple(tensor.shape))
        if found is None or found[0] not in dtypes or found[1] != shape:
            raise ValueError(f"{spec.name}: {suffix} is {found}; expected {dtypes} {shape}")
        result[suffix] = tensor.contiguous()
    return result


def _content(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor without copying them."""
    return tensor.flatten().view(torch.uint8).numpy().data


def _entry(tensor: torch.Tensor, offset: int) -> dict[str, Any]:
    return {
        "dtype": _TORCH_CODES[tensor.dtype],
        "shape": list(tensor.shape),
        "data_offsets": [offset, offset + tensor.numel() * tensor.element_size()],
    }


def _header(metadata: dict[str, str], entries: dict[str, Any]) -> bytes:
    return json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()


def _reserved_header_bytes(model_name: str, specs: Sequence[LayerSpec]) -> int:
    """Return the header's length, padded so that the first tensor is aligned.

    Checksums have one length; offsets and the dtype of a bias take the longest text they can.
    """
    end = planned_bytes(specs)
    entries = {
        f"{spec.module}.{suffix}": {
            "dtype": max(dtypes, key=len),
            "shape": list(shape),
            "data_offsets": [end, end],
        }
        for spec in specs
        for suffix, (dtypes, shape) in expected_tensors(spec).items()
    }
    checksum = xxhash.xxh3_128_hexdigest(b"")
    stored = [StoredLayer(spec, dict.fromkeys(expected_tensors(spec), checksum)) for spec in specs]
    length = len(_header(render_metadata(model_name, stored), entries))
    return layout.round_up(_LENGTH_BYTES + length, layout.ALIGN_BYTES) - _LENGTH_BYTES
