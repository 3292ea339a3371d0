"""The packed file: a model's layers in the runtime layout, ready to be mapped and multiplied with.

It is an ordinary safetensors file whose metadata says what it holds (see `packed_metadata`); what
writes it is `packed_writer`. The reader maps the file, so that weights stay pages of it, and checks
each tensor's checksum when it is first read.
"""

from pathlib import Path

import torch
import xxhash

from qlinear_service.checkpoints.safetensors_file import SafetensorsFile
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels import layout
from qlinear_service.layers import QuantizedLinear
from qlinear_service.packed_metadata import FORMAT_KEY, expected_tensors, pack_again, parse_metadata

__all__ = ["PackedFile"]

_RECOGNISED_WITHIN = 1 << 20  # bytes of header in which `is_packed` looks for the format's key


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
            found = xxhash.xxh3_128_hexdigest(tensor.flatten().view(torch.uint8).numpy().data)
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
