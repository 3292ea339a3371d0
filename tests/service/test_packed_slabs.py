"""Layers that are written slab by slab make the same file, and wrong slabs make none."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packed_files import layers_of_every_kind, write_layers
from random_layers import random_layer

from qlinear_service.kernels.assembly import Slabs
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import QuantizedLinear
from qlinear_service.packed_writer import planned_bytes, write_packed


def cut(layer: QuantizedLinear, step: int) -> Iterator[QuantizedLinear]:
    """The layer in parts of so many output features."""
    for begin in range(0, layer.spec.n, step):
        yield layer.features(begin, min(begin + step, layer.spec.n))


def large_layers() -> list[QuantizedLinear]:
    """With every tensor that a layer can have, and more than one slab each."""
    return [
        *layers_of_every_kind(),
        pack(random_layer(n=330, k=200, bias=True, symmetric=False, permuted=True, module="c")),
    ]


@pytest.mark.parametrize("step", [64, 128])
def test_the_same_file_whatever_the_slabs(step: int, tmp_path: Path) -> None:
    layers = large_layers()
    whole = write_layers(tmp_path / "whole", layers)
    written: list[int] = []
    write_packed(
        tmp_path / "cut", "test", (Slabs(layer.spec, cut(layer, step)) for layer in layers),
        specs=[layer.spec for layer in layers], progress=written.append,
    )  # fmt: skip
    assert (tmp_path / "cut").read_bytes() == whole.read_bytes()
    assert len(written) > sum(map(bool, layers)) * 3


@pytest.mark.parametrize("fault", ["fewer", "more", "odd", "foreign", "none"])
def test_slabs_that_are_no_layer_are_a_programming_error(fault: str, tmp_path: Path) -> None:
    layer = large_layers()[-1]
    parts = list(cut(layer, 128))
    if fault == "fewer":
        parts.pop()
    elif fault == "more":
        parts.append(parts[-1])
    elif fault == "odd":
        parts[0] = replace(parts[0], spec=replace(parts[0].spec, n=127))
    elif fault == "foreign":
        parts[1] = replace(parts[1], spec=replace(parts[1].spec, module="other"))
    else:
        parts.clear()
    with pytest.raises(ValueError, match=r"features"):
        write_packed(tmp_path / "x", "test", [Slabs(layer.spec, iter(parts))], specs=[layer.spec])
    assert not list(tmp_path.iterdir())


def test_a_system_that_writes_less_than_it_is_given_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_layers(tmp_path / "whole", large_layers()).read_bytes()
    real = os.pwrite

    def half(descriptor: int, content: memoryview, place: int) -> int:
        return real(descriptor, content[: -(-content.nbytes // 2)], place)

    monkeypatch.setattr("os.pwrite", half)
    assert write_layers(tmp_path / "x", large_layers()).read_bytes() == whole


def test_a_flush_that_fails_at_the_end_fails_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    layers = [pack(random_layer(n=64, k=128))]
    every_byte = planned_bytes([layers[0].spec])
    monkeypatch.setattr("qlinear_service.partial_file.FLUSH_BYTES", every_byte)
    monkeypatch.setattr("os.fdatasync", fail)
    with pytest.raises(Exception, match=r"x: cannot be written: Input/output error"):
        write_layers(tmp_path / "x", layers)


def test_a_disk_that_fails_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, content: memoryview, place: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(Exception, match=r"x: cannot be written: No space left on device"):
        write_layers(tmp_path / "x", large_layers())
    assert not list(tmp_path.iterdir())
