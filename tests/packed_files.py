"""Packed files for tests: one with every kind of layer, and how to compare what comes back."""

from collections.abc import Sequence
from pathlib import Path

import torch
from random_layers import random_layer

from qlinear_service.dtypes import DType
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import QuantizedLinear
from qlinear_service.packed import PackedFile
from qlinear_service.packed_writer import write_packed

TENSORS = ("qweight", "scales", "zeros", "bias", "k_permutation")


def layers_of_every_kind() -> list[QuantizedLinear]:
    """One layer of every kind that the file can hold, in sizes that need padding."""
    return [
        pack(random_layer(n=80, k=96, group_size=32, bias=True, module="a.0")),
        pack(random_layer(n=16, k=200, bits=8, symmetric=False, permuted=True, module="a.1")),
        pack(random_layer(n=64, k=72, group_size=-1, scale_dtype=DType.F32, bias=True, module="b")),
        pack(random_layer(n=8, k=8, scale_dtype=DType.BF16, permuted=True, module="ü")),
    ]


def write_layers(path: Path, packed: Sequence[QuantizedLinear]) -> Path:
    """Write a packed file of the model "test"."""
    write_packed(path, "test", packed, specs=[layer.spec for layer in packed])
    return path


def load_all(path: Path) -> list[QuantizedLinear]:
    """Every layer of a packed file."""
    file = PackedFile(path)
    return [file.load(spec.module) for spec in file.specs]


def assert_same(found: QuantizedLinear, expected: QuantizedLinear) -> None:
    """Both layers are the same in every spec value, dtype and bit."""
    assert found.spec == expected.spec
    for name in TENSORS:
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype
            assert torch.equal(one, other), name
