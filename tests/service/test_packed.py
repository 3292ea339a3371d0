"""The packed file gives back exactly what was put in, mapped, and is written all or nothing."""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from checkpoints import LOADED, VECTORS, weight_hash, weight_hashes
from packed_files import assert_same, layers_of_every_kind, write_layers
from random_layers import random_layer
from safetensors import safe_open

from qlinear_service.checkpoints import open_checkpoint
from qlinear_service.dtypes import DType
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels import layout
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import LayerSpec, QuantizedLinear
from qlinear_service.packed import PackedFile
from qlinear_service.packed_writer import planned_bytes, write_packed


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layers(
        tmp_path_factory.mktemp("packed") / "good.safetensors", layers_of_every_kind()
    )


def test_every_kind_of_layer_comes_back(good: Path) -> None:
    file = PackedFile(good)
    assert file.model == "test"
    expected = layers_of_every_kind()
    assert list(file.specs) == [layer.spec for layer in expected]
    for layer in expected:
        assert_same(file.load(layer.spec.module), layer)
        assert file.stored_bytes(layer.spec.module) >= layer.packed_bytes
    assert PackedFile.is_packed(good)


@pytest.mark.parametrize("vector", LOADED)
def test_real_weights_survive_exactly(vector: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(VECTORS / vector, model="m")
    path = tmp_path / "m.safetensors"
    packed = (pack(checkpoint.load(spec.module)) for spec in checkpoint.layers)
    write_packed(path, "m", packed, specs=checkpoint.layers)
    file = PackedFile(path)
    assert file.specs == checkpoint.layers
    hashes = {spec.module: weight_hash(file.load(spec.module)) for spec in file.specs}
    assert hashes == weight_hashes(vector)


def test_any_safetensors_reader_can_read_it_and_every_tensor_is_aligned(good: Path) -> None:
    header_bytes = struct.unpack("<Q", good.read_bytes()[:8])[0]
    assert (8 + header_bytes) % layout.ALIGN_BYTES == 0
    header = json.loads(good.read_bytes()[8 : 8 + header_bytes])
    with safe_open(str(good), framework="pt") as file:
        metadata = file.metadata()
        assert sorted(file.keys()) == sorted(header.keys() - {"__metadata__"})
        for name in file.keys():  # noqa: SIM118 - not a mapping
            assert header[name]["data_offsets"][0] % layout.ALIGN_BYTES == 0
            assert file.get_tensor(name).data_ptr() % layout.ALIGN_BYTES == 0
    assert metadata["qlinear.format"] == "packed"
    assert metadata["qlinear.layout_version"] == "1"
    assert metadata["qlinear.model"] == "test"
    described = json.loads(metadata["qlinear.layers"])["layers"]["a.1"]
    content = safe_open(str(good), framework="numpy").get_tensor("a.1.zeros").tobytes()
    assert described["xxh3"]["zeros"] == xxhash.xxh3_128_hexdigest(content)
    assert (described["n"], described["k"], described["zero_encoding"]) == (16, 200, "u8")


def test_loading_maps_the_file_and_copies_nothing(tmp_path: Path) -> None:
    spec = LayerSpec(
        model="test", module="big", n=8192, k=16384, bits=4, group_size=128, symmetric=True,
        has_bias=False, scale_dtype=DType.F16,
    )  # fmt: skip
    big = QuantizedLinear(
        spec=spec,
        qweight=torch.ones((512, 256, 512), dtype=torch.uint8),
        scales=torch.ones((512, 128, 16), dtype=torch.float16),
    )
    path = write_layers(tmp_path / "big.safetensors", [big])
    before = resident_bytes("RssAnon")
    loaded = PackedFile(path).load("big")
    assert loaded.qweight.sum() == loaded.qweight.numel()
    assert resident_bytes("RssAnon") - before < loaded.packed_bytes / 4
    assert str(path) in mapping_of(loaded.qweight.data_ptr())


def resident_bytes(kind: str) -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"{kind}:\s+(\d+) kB", status)
    assert match is not None
    return int(match.group(1)) * 1024


def mapping_of(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line
    raise AssertionError("mapped nowhere")


def test_checksums_are_checked_at_the_first_read_of_each_tensor(good: Path, tmp_path: Path) -> None:
    content = bytearray(good.read_bytes())
    content[-1] ^= 0x10  # the last tensor is the k_permutation of "ü"
    path = tmp_path / "flipped.safetensors"
    path.write_bytes(content)
    file = PackedFile(path)
    assert_same(file.load("b"), layers_of_every_kind()[2])
    with pytest.raises(CheckpointError, match=r"ü\.k_permutation: has checksum .*, expected"):
        file.load("ü")


def test_layers_are_taken_one_at_a_time_and_progress_is_told(tmp_path: Path) -> None:
    expected = layers_of_every_kind()
    written: list[int] = []
    tensors_before: list[int] = []

    def produce() -> Iterator[QuantizedLinear]:
        for layer in expected:
            tensors_before.append(len(written))
            yield layer

    specs = [layer.spec for layer in expected]
    write_packed(
        tmp_path / "x.safetensors", "test", produce(), specs=specs, progress=written.append
    )
    assert tensors_before == [0, 3, 7, 10]  # nothing is asked for before the last one is written
    file = PackedFile(tmp_path / "x.safetensors")
    stored = sum(file.stored_bytes(spec.module) for spec in specs)
    # Both biases are float16 where float32 was planned for.
    assert sum(written) == stored == planned_bytes(specs) - 2 * (128 + 64)


@pytest.mark.parametrize("error", [KeyboardInterrupt, CheckpointError("x", "y"), RuntimeError])
def test_an_interrupted_pack_leaves_nothing(error: Any, good: Path, tmp_path: Path) -> None:
    first, *rest = layers_of_every_kind()

    def produce() -> Iterator[QuantizedLinear]:
        yield first
        assert len(list(tmp_path.iterdir())) == 2  # the old file, and the temporary one beside it
        raise error

    path = tmp_path / "x.safetensors"
    path.write_bytes(good.read_bytes())
    kind = error if isinstance(error, type) else type(error)
    with pytest.raises(kind):
        write_packed(path, "test", produce(), specs=[first.spec, *(r.spec for r in rest)])
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    assert path.read_bytes() == good.read_bytes()


def test_a_file_is_replaced_in_one_step_under_its_readers(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(good.read_bytes())
    reader = PackedFile(path)
    write_layers(path, [pack(random_layer(n=8, k=8, module="other"))])
    assert_same(reader.load("a.0"), layers_of_every_kind()[0])
    assert [spec.module for spec in PackedFile(path).specs] == ["other"]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
        write_layers(tmp_path / "absent" / "x.safetensors", layers_of_every_kind())


@pytest.mark.parametrize("fault", ["order", "fewer", "more", "twice", "model", "shape", "bias"])
def test_layers_that_break_the_plan_are_a_programming_error(fault: str, tmp_path: Path) -> None:
    packed = layers_of_every_kind()
    specs = [layer.spec for layer in packed]
    model = "other" if fault == "model" else "test"
    if fault == "order":
        packed.reverse()
    elif fault == "fewer":
        packed.pop()
    elif fault == "more":
        packed.append(packed[0])
    elif fault == "twice":
        packed, specs = [*packed, packed[0]], [*specs, specs[0]]
    elif fault == "shape":
        packed[0] = replace(packed[0], qweight=packed[0].qweight[1:])
    elif fault == "bias":
        packed[0] = replace(packed[0], bias=None)
    with pytest.raises(ValueError, match=r".+"):
        write_packed(tmp_path / "x.safetensors", model, packed, specs=specs)
    assert not list(tmp_path.iterdir())
