"""One safetensors file: checked when it is opened, its tensors mapped when they are asked for.

The `safetensors` library checks the header (length, offsets, holes, trailing bytes); this module
adds what it does not (names that stand twice, pickles, odd files) and turns each fault into one
sentence. Tensors come back as views of the mapped file: nothing is copied.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from qlinear_service.checkpoints import strict_json
from qlinear_service.dtypes import DType
from qlinear_service.errors import CheckpointError

__all__ = ["FLOAT_CODES", "SafetensorsFile", "TensorInfo", "is_pickle"]

FLOAT_CODES = {"F16": DType.F16, "BF16": DType.BF16, "F32": DType.F32}
"""How safetensors spells the element types of scales and biases."""

_ITEM_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BF16": 16, "BOOL": 8}
_LENGTH_BYTES = 8  # the header's length, little-endian, in front of the header
_MOST_HEADER_BYTES = 100_000_000  # what the library allows
_REPAIR = "download or copy the file again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says about one tensor."""

    path: Path
    """The file that holds it."""
    dtype: str
    """As safetensors spells it: "I32", "F16", ..."""
    shape: tuple[int, ...]
    offset: int
    """Where its first byte lies in the file."""

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        digits = re.search(r"[0-9]+", self.dtype)
        bits = _ITEM_BITS.get(self.dtype) or (int(digits.group()) if digits else 8)
        return prod(self.shape) * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def is_pickle(path: Path) -> bool:
    """Say whether the file begins like a pickle or like the zip that torch.save writes.

    So may the length of a header: in a safetensors file a JSON object follows it.
    """
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES + 1)
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if start[_LENGTH_BYTES:] == b"{" and length <= _MOST_HEADER_BYTES:
        return False
    return start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in b"\2\3\4\5")


class SafetensorsFile:
    """One open file: `tensors` says what it holds, `load` maps one of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._refuse_foreign()
            # The library's stub leaves get_tensor untyped.
            self._mapped: Callable[[str], torch.Tensor] = self._opened().get_tensor
            header = self._header()
            data_begin = self._data_begin()
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from None
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.tensors = {
            name: TensorInfo(
                path, entry["dtype"], tuple(entry["shape"]), data_begin + entry["data_offsets"][0]
            )
            for name, entry in header.items()
        }
        for name in self.tensors:
            if not name.isprintable():
                raise CheckpointError(path, f"tensor name {name!r} holds control characters")

    def load(self, name: str) -> torch.Tensor:
        """Return the tensor `name` of `tensors`, a view of the mapped file."""
        try:
            return self._mapped(name)
        except (SafetensorError, RuntimeError) as error:  # the latter where memory cannot be had
            raise CheckpointError(self.path, f"cannot be mapped: {error}", tensor=name) from None

    def _refuse_foreign(self) -> None:
        if not self.path.is_file():
            found = "is not a regular file" if self.path.exists() else "does not exist"
            raise CheckpointError(self.path, f"{found}; expected a safetensors file")
        if is_pickle(self.path):
            raise CheckpointError(
                self.path,
                "is a pickle or zip file, which is never opened because loading it can run code; "
                "convert it to safetensors",
            )

    def _opened(self) -> safe_open:
        try:
            return safe_open(str(self.path), framework="pt")
        except SafetensorError as error:
            # The library quotes names from the file, which may hold anything.
            message = "".join(c if c.isprintable() else "?" for c in str(error))
            raise self._explained(message) from None

    def _data_begin(self) -> int:
        with self.path.open("rb") as file:
            return _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")

    def _header(self) -> dict[str, Any]:
        length = self._data_begin() - _LENGTH_BYTES
        with self.path.open("rb") as file:
            file.seek(_LENGTH_BYTES)
            return strict_json.parse_object(file.read(length), self.path)

    def _explained(self, message: str) -> CheckpointError:
        """Say what the library's error means, with the numbers that disagree."""
        size = self.path.stat().st_size
        length = self._data_begin() - _LENGTH_BYTES
        tensor = None
        if "header too small" in message:
            problem = f"has {size} bytes, too few for a safetensors header; {_REPAIR}"
        elif "header too large" in message or "invalid header length" in message:
            problem = (
                f"its first 8 bytes announce a header of {length} bytes but {size - 8} follow "
                f"(at most {_MOST_HEADER_BYTES} are allowed); {_REPAIR}"
            )
        elif "not fully covered" in message:
            ends = [e["data_offsets"][1] for n, e in self._header().items() if n != "__metadata__"]
            expected = _LENGTH_BYTES + length + max(ends, default=0)
            problem = f"has {size} bytes; its header describes {expected}; {_REPAIR}"
        elif match := re.search(r"invalid offset for tensor `(.*)`", message):
            tensor = match.group(1)
            problem = "its data_offsets overlap another tensor or leave a hole; " + _REPAIR
        else:
            problem = f"is not a valid safetensors file: {message}; {_REPAIR}"
        return CheckpointError(self.path, problem, tensor=tensor)
