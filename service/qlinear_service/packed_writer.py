"""Writes packed files: one layer at a time, all of the file or nothing.

The header comes first and holds checksums, so room is left for it and it is written last.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
import xxhash

from qlinear_service.errors import CheckpointError
from qlinear_service.kernels import layout
from qlinear_service.kernels.assembly import Slabs
from qlinear_service.layers import LayerSpec, QuantizedLinear
from qlinear_service.packed_metadata import StoredLayer, expected_tensors, render_metadata
from qlinear_service.partial_file import Flusher, replacing

__all__ = ["planned_bytes", "write_packed"]

_Layer = QuantizedLinear | Slabs

_LENGTH_BYTES = 8
_MOST_WRITING = 4  # parts of tensors that are made and not yet written
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
    layers: Iterable[_Layer],
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
    layers: Iterable[_Layer],
    *,
    specs: Sequence[LayerSpec],
    progress: Callable[[int], None],
) -> None:
    if len({spec.module for spec in specs}) != len(specs):
        raise ValueError("two layers have the same module name")
    reserved = _reserved_header_bytes(model_name, specs)
    file.seek(_LENGTH_BYTES + reserved)
    with ThreadPoolExecutor(1) as thread:
        writer = _Writer(file, progress, thread)
        remaining = iter(layers)
        stored = [writer.write(spec, _next(remaining, spec), model_name) for spec in specs]
        if next(remaining, None) is not None:
            raise ValueError("there are more layers than specs")
        writer.finish()
    header = _header(render_metadata(model_name, stored), writer.entries)
    assert len(header) <= reserved, "the header would run into the first tensor"
    file.seek(0)
    file.write(reserved.to_bytes(_LENGTH_BYTES, "little"))
    file.write(header.ljust(reserved))


def _next(remaining: Iterator[_Layer], spec: LayerSpec) -> _Layer:
    layer = next(remaining, None)
    if layer is None:
        raise ValueError(f"there is no layer for {spec}")
    return layer


class _Writer:
    """Writes layers one behind the other, each part by a thread while the next one is made."""

    def __init__(
        self, file: IO[bytes], progress: Callable[[int], None], thread: ThreadPoolExecutor
    ) -> None:
        self._descriptor, self._begin = file.fileno(), file.tell()
        self._progress, self._thread = progress, thread
        self._writing: deque[Future[None]] = deque()
        self._offset = 0
        self.entries: dict[str, Any] = {}

    def write(self, spec: LayerSpec, layer: QuantizedLinear | Slabs, model: str) -> StoredLayer:
        """Write the tensors of one layer, and return what the header must say of it."""
        if layer.spec != spec or spec.model != model:
            raise ValueError(f"expected layer {spec}, model {model!r}; got {layer.spec}")
        parts = layer.parts if isinstance(layer, Slabs) else iter((layer,))
        places: dict[str, int] = {}
        hashes: dict[str, Any] = {}
        features = 0
        for part in parts:
            if features % layout.PAD_N or replace(part.spec, n=spec.n) != spec:
                raise ValueError(f"{part.spec} behind {features} features is no part of {spec}")
            tensors = _tensors(part)
            if not places:
                places = self._place(spec, tensors)
                hashes = {suffix: xxhash.xxh3_128() for suffix in tensors}
            elif spec.has_k_permutation:
                del tensors["k_permutation"]  # the first part has brought all of it
            for suffix, tensor in tensors.items():
                content = _content(tensor)
                hashes[suffix].update(content)
                self._write_at(places[suffix], content)
                places[suffix] += content.nbytes
                self._progress(content.nbytes)
            features += part.spec.n
        if features != spec.n:
            raise ValueError(f"{features} features came for {spec}")
        return StoredLayer(spec, {suffix: made.hexdigest() for suffix, made in hashes.items()})

    def _place(self, spec: LayerSpec, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
        """Return where each tensor of a layer begins, and note that for the header."""
        places = {}
        for suffix, (_, shape) in expected_tensors(spec).items():
            places[suffix] = self._offset
            entry = _entry(tensors[suffix].dtype, shape, self._offset)
            self.entries[f"{spec.module}.{suffix}"] = entry
            self._offset = entry["data_offsets"][1]
        return places

    def _write_at(self, offset: int, content: memoryview) -> None:
        while len(self._writing) >= _MOST_WRITING:
            self._writing.popleft().result()
        place = self._begin + offset
        self._writing.append(self._thread.submit(_write_all, self._descriptor, content, place))

    def finish(self) -> None:
        """Wait until all is written.

        Raises:
            OSError: it could not be.
        """
        while self._writing:
            self._writing.popleft().result()


def _write_all(descriptor: int, content: memoryview, place: int) -> None:
    while content.nbytes:
        written = os.pwrite(descriptor, content, place)
        content, place = content[written:], place + written


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


def _entry(dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> dict[str, Any]:
    code = _TORCH_CODES[dtype]
    nbytes = prod(shape) * _ITEM_BYTES[code]
    return {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}


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
