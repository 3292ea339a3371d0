"""A packed file that is damaged, foreign or of another version is one clean error, always."""

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from checkpoints import VECTORS
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_files import TENSORS, layers_of_every_kind, load_all, write_layers
from random_layers import random_layer
from safetensors import safe_open
from safetensors.torch import save_file

from qlinear_service.checkpoints.safetensors_file import SafetensorsFile
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels.packing import pack
from qlinear_service.packed import PackedFile


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layers(
        tmp_path_factory.mktemp("packed") / "good.safetensors", layers_of_every_kind()
    )


def with_metadata(good: Path, path: Path, **changes: str | None) -> Path:
    """Write the good file with other metadata, and a right checksum of it unless one is given."""
    content = good.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    metadata = header["__metadata__"]
    for key, value in changes.items():
        if value is None:
            del metadata[f"qlinear.{key}"]
        else:
            metadata[f"qlinear.{key}"] = value
    if "layers_xxh3" not in changes and "layers" in changes:
        text = metadata["qlinear.layers"]
        metadata["qlinear.layers_xxh3"] = xxhash.xxh3_128_hexdigest(text.encode())
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return path


def described(good: Path, module: str, **changes: Any) -> str:
    """The good file's description with some values of one layer changed."""
    metadata = safe_open(str(good), framework="pt").metadata()
    content = json.loads(metadata["qlinear.layers"])
    content["layers"][module] |= changes
    return json.dumps(content)


def test_another_layout_version_says_pack_again_and_how(good: Path, tmp_path: Path) -> None:
    path = with_metadata(good, tmp_path / "x.safetensors", layout_version="0")
    with pytest.raises(CheckpointError, match=r"has layout version '0' and .* reads '1'") as caught:
        PackedFile(path)
    assert f"qlinear pack CHECKPOINT_FOLDER -o {path} --force" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": None}, "not a packed one"),
        ({"format": "other"}, "not a packed one"),
        ({"layout_version": None}, "has layout version None"),
        ({"model": "renamed"}, "names its model 'test' and 'renamed'"),
        ({"model": None}, "names its model 'test' and None"),
        ({"layers_xxh3": "0" * 32}, "has checksum"),
        ({"layers": None, "layers_xxh3": None}, "has checksum"),
        ({"layers": "{}"}, "names its model None"),
        ({"layers": "[]"}, "holds a JSON list"),
        ({"layers": '{"model":"test","layers":{}}'}, "describes no layers"),
        ({"layers": '{"model":"test","layers":{"a":3}}'}, "a: its description cannot be used"),
        ({"layers": '{"model":"test","layers":{"a":{}}}'}, "a: its description cannot be used"),
    ],
)
def test_metadata_that_cannot_be_used(
    changes: dict[str, str | None], message: str, good: Path, tmp_path: Path
) -> None:
    path = with_metadata(good, tmp_path / "x.safetensors", **changes)
    with pytest.raises(CheckpointError, match=message):
        PackedFile(path)


@pytest.mark.parametrize(
    ("module", "changes"),
    [
        ("a.0", {"n": 0}), ("a.0", {"n": -4}), ("a.0", {"n": 2**40}), ("a.0", {"n": True}),
        ("a.0", {"k": 96.0}), ("a.0", {"k": "96"}), ("a.0", {"bits": 5}),
        ("a.0", {"group_size": 48}), ("a.0", {"scale_dtype": "float8"}),
        ("a.0", {"source": {"x": "y"}}), ("a.0", {"source": {"tool": 3}}),
        ("a.0", {"symmetric": 1}), ("a.0", {"zero_encoding": "u8"}), ("a.0", {"xxh3": {}}),
    ],
)  # fmt: skip
def test_descriptions_that_cannot_be_used(
    module: str, changes: dict[str, Any], good: Path, tmp_path: Path
) -> None:
    text = described(good, module, **changes)
    path = with_metadata(good, tmp_path / "x.safetensors", layers=text)
    with pytest.raises(CheckpointError, match=f"{module}: its description cannot be used"):
        PackedFile(path)


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        ("a.0", {"n": 129}, r"a\.0\.qweight: is U8 \[8, 2, 512\]; expected U8 \[12, 2, 512\]"),
        ("a.0", {"k": 300}, r"a\.0\.qweight: is U8 .* expected U8 \[8, 6, 512\]"),
        ("a.0", {"bits": 8}, r"a\.0\.qweight: is U8 .* expected U8 \[8, 2, 1024\]"),
        ("a.0", {"group_size": 64}, r"a\.0\.scales: is F16 .* expected F16 \[8, 2, 16\]"),
        ("a.0", {"scale_dtype": "bfloat16"}, r"a\.0\.scales: is F16 .* expected BF16"),
        ("a.0", {"has_bias": False}, r"a\.0\.bias: belongs to no layer"),
        ("ü", {"has_bias": True, "xxh3": dict.fromkeys(TENSORS, "")}, r"ü\.bias: is missing"),
    ],
)
def test_descriptions_that_contradict_the_tensors(
    module: str, changes: dict[str, Any], message: str, good: Path, tmp_path: Path
) -> None:
    text = described(good, module, **changes)
    path = with_metadata(good, tmp_path / "x.safetensors", layers=text)
    with pytest.raises(CheckpointError, match=message):
        PackedFile(path)


def test_a_permutation_that_is_none_is_refused(tmp_path: Path) -> None:
    layer = pack(random_layer(n=8, k=8, permuted=True))
    assert layer.k_permutation is not None
    wild = replace(layer, k_permutation=layer.k_permutation.clone().fill_(2_000_000_000))
    path = write_layers(tmp_path / "x.safetensors", [wild])
    with pytest.raises(
        CheckpointError, match=r"layer\.k_permutation: is no permutation of 0 \.\. 7"
    ):
        load_all(path)


def test_files_that_are_not_packed(tmp_path: Path) -> None:
    path = VECTORS / "gptq-autogptq-w4-g128-sym" / "gptq_model-4bit-128g.safetensors"
    assert not PackedFile.is_packed(path)
    assert not PackedFile.is_packed(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    assert not PackedFile.is_packed(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a packed one"):
        PackedFile(path)


def test_every_flipped_bit_of_the_header_is_seen(good: Path, tmp_path: Path) -> None:
    content = bytearray(good.read_bytes())
    length = 8 + struct.unpack("<Q", content[:8])[0]
    path = tmp_path / "x.safetensors"
    for position in range(length):
        content[position] ^= 1 << position % 8
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            load_all(path)
        content[position] ^= 1 << position % 8


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_damage_anywhere_is_one_clean_error(
    data: st.DataObject, good: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(good.read_bytes())
    if data.draw(st.booleans(), label="truncate"):
        content = content[: data.draw(st.integers(0, len(content) - 1), label="length")]
    else:
        for _ in range(data.draw(st.integers(1, 3), label="flips")):
            position = data.draw(st.integers(0, len(content) - 1), label="byte")
            content[position] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    if content == good.read_bytes():
        return  # two flips of the same bit
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_all(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()


def test_tensors_that_another_program_moved_are_refused(good: Path, tmp_path: Path) -> None:
    """Saved again by the safetensors library, the header takes its own length: a valid file."""
    path = tmp_path / "x.safetensors"
    with safe_open(str(good), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, path, metadata=file.metadata() | {"note": "x"})
    with pytest.raises(CheckpointError, match="which is no multiple of 64") as caught:
        PackedFile(path)
    assert f"qlinear pack CHECKPOINT_FOLDER -o {path} --force" in str(caught.value)


def test_every_tensor_of_a_layer_is_aligned_in_memory_too(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(self: SafetensorsFile, name: str) -> torch.Tensor:
        tensor = load(self, name)
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        room[1:] = tensor.flatten()
        return room[1:].view(tensor.shape)

    load = SafetensorsFile.load
    monkeypatch.setattr(SafetensorsFile, "load", moved)
    with pytest.raises(CheckpointError, match=r"a\.0\.qweight: starts at byte .* pack the check"):
        load_all(good)
