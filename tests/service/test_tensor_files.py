"""Which files of a checkpoint folder are read, and what every damaged one is refused with."""

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qlinear_service.checkpoints.safetensors_file import SafetensorsFile
from qlinear_service.checkpoints.tensor_files import TensorFiles
from qlinear_service.errors import CheckpointError

ONE = {"a": torch.arange(8, dtype=torch.uint8)}
TWO = {"b": torch.ones(4)}
INDEX = "model.safetensors.index.json"


def write_index(folder: Path, weight_map: Any, name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_raw(
    path: Path, header: str | bytes, content: bytes, *, length: int | None = None
) -> Path:
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + content)
    return path


def entry(start: int, end: int, dtype: str = "U8") -> str:
    return f'{{"dtype":"{dtype}","shape":[{end - start}],"data_offsets":[{start},{end}]}}'


def test_one_file_or_several_without_an_index(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "model.safetensors")
    assert set(TensorFiles(tmp_path).tensors) == {"a"}
    save_file(TWO, tmp_path / "gptq_model-4bit-128g.safetensors")
    files = TensorFiles(tmp_path)
    assert set(files.tensors) == {"a", "b"}
    assert torch.equal(files.load("a"), ONE["a"])
    assert (files.tensors["b"].dtype, files.tensors["b"].shape, files.tensors["b"].nbytes) == (
        "F32", (4,), 16,
    )  # fmt: skip


def test_a_name_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "model.safetensors")
    save_file(ONE | TWO, tmp_path / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a: is also in consolidated"):
        TensorFiles(tmp_path)


def test_the_index_is_the_authority(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "1.safetensors")
    save_file({"a": torch.zeros(8, dtype=torch.uint8)} | TWO, tmp_path / "2.safetensors")
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    # Neither a stray file with the usual name, nor one that cannot be read, is looked at.
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"")
    files = TensorFiles(tmp_path)
    assert torch.equal(files.load("a"), ONE["a"])
    assert files.unindexed == ["a in 2.safetensors"]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "1.safetensors", "c": "1.safetensors"}, r"1\.safetensors: c: is missing, although"),
        ({"a": "3.safetensors"}, r"a: its shard 3\.safetensors is not in the folder"),
        ({"a": "../x/1.safetensors"}, r"names the file '\.\./x/1\.safetensors'"),
        ({"a": "/etc/passwd"}, "names the file '/etc/passwd'"),
        ({"a": "x\\1.safetensors"}, "names the file"),
        ({"a": "..safetensors"}, "names the file"),
        ({"a": ""}, "names the file ''"),
        ({"a": 3}, "names the file '3'"),
        ({"a": "pytorch_model.bin"}, "may be pickles"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_a_wrong_index_is_refused(weight_map: Any, message: str, tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "1.safetensors")
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message) as caught:
        TensorFiles(tmp_path)
    assert "\n" not in str(caught.value)


def test_which_index_counts(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "1.safetensors")
    write_index(tmp_path, {"a": "1.safetensors"}, "gptq_model.safetensors.index.json")
    assert set(TensorFiles(tmp_path).tensors) == {"a"}
    write_index(tmp_path, {"z": "1.safetensors"}, "old.safetensors.index.json")
    with pytest.raises(CheckpointError, match="holds several indexes"):
        TensorFiles(tmp_path)
    write_index(tmp_path, {"a": "1.safetensors"})
    assert set(TensorFiles(tmp_path).tensors) == {"a"}


@pytest.mark.parametrize("indexed", [True, False])
def test_a_link_that_leads_outside_is_refused(indexed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(ONE, tmp_path / "outside.safetensors")
    (folder / "1.safetensors").symlink_to(tmp_path / "outside.safetensors")
    if indexed:
        write_index(folder, {"a": "1.safetensors"})
    with pytest.raises(CheckpointError, match="outside the checkpoint folder"):
        TensorFiles(folder)


def test_links_inside_the_folder_and_into_a_hub_cache_are_followed(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "real.bytes")
    (tmp_path / "model.safetensors").symlink_to("real.bytes")
    assert set(TensorFiles(tmp_path).tensors) == {"a"}
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0a1b", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file(TWO, blobs / "5eed")
    (snapshot / "model.safetensors").symlink_to("../../blobs/5eed")
    assert set(TensorFiles(snapshot).tensors) == {"b"}


class Trap:
    """Leaves a mark if anything unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights", "model.safetensors"])
@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_are_named_and_never_opened(name: str, zipped: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if zipped:
        torch.save(Trap(tmp_path / "sprung"), folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(CheckpointError, match=f"{name}: is a pickle or zip file"):
        TensorFiles(folder)
    assert not (tmp_path / "sprung").exists()


def test_folders_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
        TensorFiles(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        TensorFiles(tmp_path / "absent")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is not a regular file"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize(
    ("header", "content", "length", "message"),
    [
        (b"", b"", None, "not a valid safetensors file"),
        (f'{{"a":{entry(0, 4)}}}', b"1234", 1 << 62, "announce a header of 4611686018427387904"),
        (f'{{"a":{entry(0, 4)}}}', b"1234", 99, "announce a header of 99 bytes but"),
        (f'{{"a":{entry(0, 4)}}}', b"123", None, "has 64 bytes; its header describes 65"),
        (f'{{"a":{entry(0, 4)}}}', b"12345", None, "has 66 bytes; its header describes 65"),
        (f'{{"a":{entry(4, 8)}}}', b"12345678", None, "a: its data_offsets overlap"),
        (f'{{"a":{entry(0, 4)},"b":{entry(2, 6)}}}', b"123456", None, "data_offsets overlap"),
        (f'{{"a":{entry(0, 4)},"a":{entry(0, 4)}}}', b"1234", None, "a: the name stands twice"),
        (f'{{"a":{entry(0, 4, "U9")}}}', b"1234", None, "unknown variant `U9`"),
        ('{"a":{"dtype":"U8","shape":[4611686018427387904,8],"data_offsets":[0,4]}}', b"1234",
         None, "overflow"),
        (f'{{"a\\n":{entry(0, 4)}}}', b"1234", None, "holds control characters"),
        (f'{{"a\\n":{entry(1, 4)}}}', b"123", None, "invalid offset|overlap"),
        ("[" * 3000, b"", None, "not a valid safetensors file"),
        (b"\xff{}", b"", None, "not a valid safetensors file"),
        ('{"__metadata__":{"x":1}}', b"", None, "not a valid safetensors file"),
    ],
)  # fmt: skip
def test_damaged_files_end_in_one_sentence(
    header: str | bytes, content: bytes, length: int | None, message: str, tmp_path: Path
) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, content, length=length)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).isprintable()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        SafetensorsFile(tmp_path / "model.safetensors")


def test_metadata_and_padded_headers_are_read(tmp_path: Path) -> None:
    header = f'{{"__metadata__":{{"made":"here"}},"a":{entry(0, 4)}}}   '
    file = SafetensorsFile(write_raw(tmp_path / "x.safetensors", header, b"1234"))
    assert file.metadata == {"made": "here"}
    assert bytes(file.load("a").tolist()) == b"1234"


@pytest.mark.parametrize("start", [b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"])
def test_a_header_whose_length_looks_like_a_pickle_is_read(start: bytes, tmp_path: Path) -> None:
    header = f'{{"a":{entry(0, 4)}}}'.ljust(int.from_bytes(start, "little"))
    path = write_raw(tmp_path / "x.safetensors", header, b"1234")
    assert path.read_bytes().startswith(start)
    assert bytes(SafetensorsFile(path).load("a").tolist()) == b"1234"


def test_a_file_that_memory_does_not_suffice_to_map_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> torch.Tensor:
        raise RuntimeError("unable to mmap 7 bytes")

    file = SafetensorsFile(write_raw(tmp_path / "x.safetensors", f'{{"a":{entry(0, 4)}}}', b"1234"))
    monkeypatch.setattr(file, "_mapped", fail)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: a: cannot be mapped: unable to"):
        file.load("a")


def test_hidden_files_are_left_overs_of_other_programs(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "model.safetensors")
    (tmp_path / "._model.safetensors").write_bytes(b"Mac OS X")
    assert set(TensorFiles(tmp_path).tensors) == {"a"}


def test_metadata_gives_names_to_tensors_of_its_own_file_only(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "1.safetensors", {"mine": "a", "its": "b"})
    save_file(TWO, tmp_path / "2.safetensors")
    files = TensorFiles(tmp_path)
    assert set(files.tensors) == {"a", "b", "mine"}
    assert torch.equal(files.load("mine"), ONE["a"])
