"""What is found at a path, and that layers come out one at a time, exact, whatever the source."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    SMALL,
    VECTORS,
    gptq_tensors,
    weight_hash,
    weight_hashes,
    write_checkpoint,
)
from random_layers import random_layer

from qlinear_service.checkpoints import Checkpoint
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import LogicalLayer
from qlinear_service.models import CheckpointModel, PackedModel, discover, open_model
from qlinear_service.packed_writer import write_packed


def write_packed_model(path: Path, model: str, modules: Sequence[str] = ("layer",)) -> Path:
    layers = [pack(random_layer(n=16, k=64, model=model, module=module)) for module in modules]
    write_packed(path, model, layers, specs=[layer.spec for layer in layers])
    return path


def names(path: Path) -> list[str]:
    return [model.name for model in discover(path)]


def test_a_checkpoint_folder_is_one_model() -> None:
    [model] = discover(VECTORS / SMALL)
    assert isinstance(model, CheckpointModel)
    assert model.name == SMALL
    [layer] = model.load_layers()
    assert layer.spec == model.specs[0]
    assert weight_hash(layer) == weight_hashes(SMALL)["layer"]
    model.verify()


def test_a_sharded_checkpoint_gives_every_layer_in_order() -> None:
    vector = "gptq-gptqmodel-v1-phi3-fused-sharded"
    model = open_model(VECTORS / vector, name="phi")
    layers = list(model.load_layers())
    assert [layer.spec for layer in layers] == list(model.specs)
    assert {x.spec.module: weight_hash(x) for x in layers} == weight_hashes(vector)
    assert {spec.model for spec in model.specs} == {"phi"}


def test_a_packed_file_is_one_model_and_keeps_its_name(tmp_path: Path) -> None:
    [model] = discover(write_packed_model(tmp_path / "file.safetensors", "inside", ("b", "a")))
    assert isinstance(model, PackedModel)
    assert (model.name, model.layout_version) == ("inside", 1)
    assert [layer.spec.name for layer in model.load_layers()] == ["inside/b", "inside/a"]
    assert model.stored_bytes("a") == sum(
        layer.packed_bytes for layer in model.load_layers() if layer.spec.module == "a"
    )


def test_a_folder_of_several_models(tmp_path: Path) -> None:
    write_packed_model(tmp_path / "1.safetensors", "zebra")
    write_packed_model(tmp_path / "2.safetensors", "ant")
    write_checkpoint(tmp_path / "moose")
    (tmp_path / "README.md").write_text("not a model")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "lost+found").mkdir()
    assert names(tmp_path) == ["ant", "moose", "zebra"]


def test_a_packed_file_alone_in_a_folder(tmp_path: Path) -> None:
    write_packed_model(tmp_path / "1.safetensors", "m")
    assert names(tmp_path) == ["m"]


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    write_packed_model(tmp_path / "a.safetensors", "m")
    write_checkpoint(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"its model is called 'm', like the one in .*a\.saf"):
        discover(tmp_path)


@pytest.mark.parametrize("content", ["nothing", "empty folder", "broken file", "foreign file"])
def test_a_folder_with_something_that_is_no_model_is_refused(content: str, tmp_path: Path) -> None:
    if content != "nothing":
        write_packed_model(tmp_path / "good.safetensors", "m")
    if content == "empty folder":
        (tmp_path / "empty").mkdir()
    elif content == "broken file":
        (tmp_path / "x.safetensors").write_bytes((tmp_path / "good.safetensors").read_bytes()[:999])
    elif content == "foreign file":
        write_checkpoint(tmp_path / "c")
        (tmp_path / "c" / "model.safetensors").rename(tmp_path / "x.safetensors")
        (tmp_path / "c" / "quantize_config.json").unlink()
        (tmp_path / "c").rmdir()
    message = {
        "nothing": r"holds no \*\.safetensors file",
        "empty folder": r"empty: holds no \*\.safetensors file",
        "broken file": r"x\.safetensors: its first 8 bytes announce|x\.safetensors: has 999 bytes",
        "foreign file": r"x\.safetensors: is a safetensors file but not a packed one",
    }[content]
    with pytest.raises(CheckpointError, match=message) as caught:
        discover(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_truncated_packed_file_alone_is_still_taken_for_one(tmp_path: Path) -> None:
    path = write_packed_model(tmp_path / "m.safetensors", "m")
    path.write_bytes(path.read_bytes()[:-1])
    for place in (path, tmp_path):
        with pytest.raises(CheckpointError, match=r"m\.safetensors: has \d+ bytes; its header des"):
            discover(place)


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; expected a packed file"):
        discover(tmp_path / "absent")


def test_a_packed_model_with_a_name_that_cannot_be_asked_for(tmp_path: Path) -> None:
    path = write_packed_model(tmp_path / "m.safetensors", "a/b")
    with pytest.raises(CheckpointError, match="would be called 'a/b'"):
        discover(path)


def test_damaged_values_stop_the_load_at_their_layer(tmp_path: Path) -> None:
    tensors = gptq_tensors("a") | gptq_tensors("b")
    tensors["b.scales"][0, 0] = torch.nan
    [model] = discover(write_checkpoint(tmp_path, tensors))
    layers = model.load_layers()
    assert next(layers).spec.module == "a"
    with pytest.raises(CheckpointError, match=r"b\.scales: group 0, column 0 is nan"):
        next(layers)
    with pytest.raises(CheckpointError, match=r"b\.scales"):
        model.verify()


def test_a_checkpoint_is_never_unpacked_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(VECTORS / "gptq-gptqmodel-v1-phi3-fused-sharded")
    assert isinstance(model, CheckpointModel)
    loaded: list[str] = []
    checkpoint: Checkpoint = model._checkpoint
    load = checkpoint.load

    def noted(module: str, *slab: Any) -> LogicalLayer:
        loaded.append(module)
        return load(module, *slab)

    monkeypatch.setattr(checkpoint, "load", noted)
    for count, _ in enumerate(model.load_layers(), start=1):
        assert len(loaded) == count
