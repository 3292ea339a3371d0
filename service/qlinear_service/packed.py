"""The packed file: a model's layers in the runtime layout, ready to be mapped and multiplied with.

It is an ordinary safetensors file whose metadata says what it holds (see `packed_metadata`). The
writer streams one layer at a time; the reader maps the file, so that weights stay pages of it,
and checks each tensor's checksum when it is first read.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import xxhash

from qlinear_service.checkpoints.safetensors_file import SafetensorsFile
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels import layout
from qlinear_service.layers import LayerSpec, QuantizedLinear
from qlinear_service.packed_metadata import (
    FORMAT_KEY,
    StoredLayer,
    expected_tensors,
    pack_again,
    parse_metadata,
    render_metadata,
)
from qlinear_service.partial_file import Flusher, replacing

__all__ = ["PackedFile", "planned_bytes", "write_packed"]

_LENGTH_BYTES = 8
_ITEM_BYTES = {"U8": 1, "F16": 2, "BF16": 2, "I32": 4, "F32": 4}
_TORCH_CODES = {
    torch.uint8: "U8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int32: "I32",
}
_RECOGNISED_WITHIN = 1 << 20  # bytes of header in which `is_packed` looks for the format's key


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
    entries: dict[str, Any] = {}
    stored: list[StoredLayer] = []
    offset = 0
    for spec, layer in zip(specs, layers, strict=True):
        if layer.spec != spec or spec.model != model_name:
            raise ValueError(f"expected layer {spec}, model {model_name!r}; got {layer.spec}")
        checksums: dict[str, str] = {}
        for suffix, tensor in _tensors(layer).items():
            content = _content(tensor)
            checksums[suffix] = xxhash.xxh3_128_hexdigest(content)
            entries[f"{spec.module}.{suffix}"] = _entry(tensor, offset)
            offset += file.write(content)
            progress(content.nbytes)
        stored.append(StoredLayer(spec, checksums))
    header = _header(render_metadata(model_name, stored), entries)
    assert len(header) <= reserved, "the header would run into the first tensor"
    file.seek(0)
    file.write(reserved.to_bytes(_LENGTH_BYTES, "little"))
    file.write(header.ljust(reserved))


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


class PackedFile:
    """An open packed file: descriptions at once, weights when they are asked for.

    Tensors of a loaded layer are views of the mapped file and must not be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = SafetensorsFile(path)
        contents = parse_metadata(self._file.metadata, path)
        self.model = contents.model
        self._layers = contents.layers
        self.specs = tuple(layer.spec for layer in contents.layers.values())
        self._verified: set[str] = set()
        self._check_tensors()

    @staticmethod
    def is_packed(path: Path) -> bool:
        """Say whether the file looks like a packed one, damaged or not."""
        if not path.is_file():  # opening a pipe would wait for whoever writes into it
            return False
        try:
            with path.open("rb") as file:
                return f'"{FORMAT_KEY}"'.encode() in file.read(_RECOGNISED_WITHIN)
        except OSError:
            return False

    def stored_bytes(self, module: str) -> int:
        """Return the bytes of the layer's tensors, padding included."""
        spec = self._layers[module].spec
        return sum(self._file.tensors[f"{module}.{s}"].nbytes for s in expected_tensors(spec))

    def load(self, module: str) -> QuantizedLinear:
        """Return the layer called `module` (`LayerSpec.module`), mapped from the file.

        Raises:
            CheckpointError: a tensor's checksum is wrong (checked at its first read).
        """
        layer = self._layers[module]
        spec = layer.spec
        tensors = {
            suffix: self._checked(f"{module}.{suffix}", layer.xxh3[suffix])
            for suffix in expected_tensors(spec)
        }
        permutation = tensors.get("k_permutation")
        if permutation is not None:
            permutation = permutation[: spec.k]
            # A gather would follow a wrong index out of its buffer.
            if not torch.equal(permutation.sort().values, torch.arange(spec.k, dtype=torch.int32)):
                raise CheckpointError(
                    self.path, f"is no permutation of 0 .. {spec.k - 1}; pack again",
                    tensor=f"{module}.k_permutation",
                )  # fmt: skip
        weight = tensors.get("weight")  # of a layer that is not quantized
        return QuantizedLinear(
            spec=spec,
            qweight=tensors["qweight"] if weight is None else weight,
            scales=tensors["scales"] if weight is None else weight.new_empty(0),
            zeros=tensors.get("zeros"),
            bias=tensors.get("bias"),
            k_permutation=permutation,
        )

    def _checked(self, name: str, expected: str) -> torch.Tensor:
        tensor = self._file.load(name)
        # In memory as in the file: the library maps it, and a page's start is aligned.
        self._check_alignment(name, tensor.data_ptr())
        if name not in self._verified:
            found = xxhash.xxh3_128_hexdigest(_content(tensor))
            if found != expected:
                raise CheckpointError(
                    self.path,
                    f"has checksum {found}, expected {expected}; the file is damaged: copy or "
                    "pack it again",
                    tensor=name,
                )
            self._verified.add(name)
        return tensor

    def _check_tensors(self) -> None:
        """Check that the file holds exactly the tensors that its layers have."""
        described = {
            f"{spec.module}.{suffix}": expected
            for spec in self.specs
            for suffix, expected in expected_tensors(spec).items()
        }
        for name, (dtypes, shape) in described.items():
            info = self._file.tensors.get(name)
            if info is None or info.dtype not in dtypes or info.shape != shape:
                raise CheckpointError(
                    self.path,
                    f"is {info or 'missing'}; expected {' or '.join(dtypes)} {list(shape)}; copy "
                    "or pack the file again",
                    tensor=name,
                )
        for name in self._file.tensors:
            if name not in described:
                raise CheckpointError(
                    self.path, "belongs to no layer that the file describes", tensor=name
                )
        for name in described:
            self._check_alignment(name, self._file.tensors[name].offset)

    def _check_alignment(self, name: str, place: int) -> None:
        """Refuse a tensor that no kernel could read: other programs pack tensors closely."""
        if place % layout.ALIGN_BYTES != 0:
            raise CheckpointError(
                self.path,
                f"starts at byte {place}, which is no multiple of {layout.ALIGN_BYTES}, as happens "
                f"when another program saves the file; {pack_again(self.path)}",
                tensor=name,
            )
