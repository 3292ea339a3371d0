"""AWQ, Marlin and compressed-tensors files with a fault: a sentence that names it for each."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VECTORS, weight_hash, weight_hashes
from safetensors.torch import load_file, save_file

from qlinear_service.checkpoints import Checkpoint, open_checkpoint
from qlinear_service.errors import CheckpointError

AWQ = "awq-autoawq-layer-n64-k96-g32-legacy-config"
MARLIN = "marlin-ist-n256-k256-g128"
MARLIN_BIAS = "marlin-autogptq-n256-k256-g128-bias"
CT = "ct-layer-n64-k128-g32-asym"
INT8_ZEROS = "ct-old06-layer-n128-k384-g128-asym-int8-zp"
ORDERED = "ct-llmcompressor-old-gptq-w4a16-g32-actorder-group"
HALF = torch.float16


def edited(
    folder: Path,
    vector: str,
    tensors: dict[str, torch.Tensor | None] | None = None,
    **settings: Any,
) -> Path:
    """A copy of a vector with some tensors of its layer and settings replaced; None removes one."""
    folder.mkdir(exist_ok=True)
    [weights] = (VECTORS / vector).glob("*.safetensors")
    content = load_file(weights)
    module = next(
        name.rpartition(".")[0]
        for name in content
        if name.endswith(("B", "ight_packed", "qweight"))
    )
    for suffix, tensor in (tensors or {}).items():
        content.pop(f"{module}.{suffix}", None)
        if tensor is not None:
            content[f"{module}.{suffix}"] = tensor
    save_file(content, folder / "model.safetensors")
    for path in (VECTORS / vector).glob("*config.json"):
        config = json.loads(path.read_text())
        inner = config.get("quantization_config", config)
        inner.update(settings)
        (folder / path.name).write_text(json.dumps(config))
    return folder


def loaded(folder: Path) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    for spec in checkpoint.layers:
        checkpoint.load(spec.module)
    return checkpoint


def i32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def group(**values: Any) -> dict[str, Any]:
    """A config group as llm-compressor writes it, with some values replaced."""
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group",
               "group_size": 32} | values  # fmt: skip
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


@pytest.mark.parametrize(
    ("vector", "tensors", "message"),
    [
        (AWQ, {"qweight": i32(12, 64)}, r"layer\.scales: has shape \[3, 64\]; expected \[1, 512\]"),
        (AWQ, {"qweight": torch.zeros(96, 8)}, r"layer\.qweight: has dtype F32; expected I32"),
        (AWQ, {"qzeros": None}, r"layer\.qzeros: is missing beside layer\.qweight, layer\.scales"),
        (AWQ, {"qzeros": i32(3, 7)}, r"layer\.qzeros: has shape \[3, 7\]; expected \[3, 8\]"),
        (AWQ, {"scales": None}, r"layer\.scales: is missing"),
        (AWQ, {"scales": i32(3, 64)}, r"layer\.scales: has dtype I32; expected F16"),
        (AWQ, {"g_idx": i32(96)}, r"layer\.g_idx: belongs to GPTQ, but the configuration says AWQ"),
        (AWQ, {"bias": torch.zeros(63)}, r"layer\.bias: has shape \[63\]; expected \[64\]"),
        (AWQ, {"weight": torch.zeros(64, 96)}, r"layer\.weight: stands beside a qweight"),
        (MARLIN, {"B": i32(16, 500)}, r"layer\.B: has shape \[16, 500\]; expected a width tha"),
        (MARLIN, {"B": i32(8, 512)}, r"layer\.s: has shape \[2, 256\]; expected \[1, 256\]"),
        (MARLIN, {"s": None}, r"layer\.s: is missing beside layer\.B"),
        (MARLIN, {"qzeros": i32(2, 32)}, r"layer\.qzeros: has no place in a Marlin layer"),
        (MARLIN, {"g_idx": i32(256)}, r"layer\.g_idx: has no place in a Marlin layer"),
        (MARLIN_BIAS, {"bias": torch.zeros(64, dtype=HALF)},
         r"layer\.bias: has shape \[64\]; expected \[256\]"),
        (CT, {"weight_scale": None}, r"layer\.weight_scale: is missing"),
        (CT, {"weight_shape": None}, r"layer\.weight_shape: is missing"),
        (CT, {"weight_zero_point": None}, r"layer: has 4 bits, 4 groups of 32 along k = 128, with"
         "out weight_zero_point, without weight_g_idx, but the configuration has 4 bits, group_si"),
        (CT, {"weight_zero_point": i32(8, 3)}, r"has shape \[8, 3\]; expected \[8, 4\]"),
        (CT, {"weight_zero_point": torch.full((64, 4), 9, dtype=torch.int8)},
         r"layer\.weight_zero_point: holds 9; expected -8 \.\. 7"),
        (CT, {"weight_scale": torch.ones(64, 3, dtype=HALF)}, "groups that divides k = 128"),
        (CT, {"weight_scale": torch.ones(64, 2, dtype=HALF)}, r"expected \[8, 2\]"),
        (CT, {"weight_scale": torch.ones(64, 0, dtype=HALF)}, "groups that divides k = 128"),
        (CT, {"weight_packed": i32(64, 15)}, r"does not match layer\.weight_packed \[64, 15"),
        (CT, {"weight_packed": None}, "is said to hold pack-quantized, but no tensor of it"),
        (CT, {"weight_shape": torch.tensor([64, 0])}, r"says \[64, 0\]"),
        (CT, {"weight_shape": torch.tensor([64, -128])}, r"says \[64, -128\]"),
        (CT, {"weight_shape": torch.tensor([64, 128, 1])}, r"has shape \[3\]; expected \[2\]"),
        (CT, {"weight_g_idx": torch.full((128,), 4).int()}, r"weight_g_idx\[0\] = 4; expec"),
        (CT, {"weight_g_idx": i32(64)}, r"weight_g_idx: has shape \[64\]; expected \[128\]"),
        (CT, {"bias": torch.zeros(3)}, r"layer\.bias: has shape \[3\]; expected \[64\]"),
    ],
)  # fmt: skip
def test_a_faulty_tensor_is_named(
    vector: str, tensors: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        loaded(edited(tmp_path, vector, tensors))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("vector", "settings", "message"),
    [
        (AWQ, {"w_bit": 8}, "bits is 8; AWQ checkpoints of 4 are loaded"),
        (AWQ, {"zero_point": "yes"}, "zero_point is 'yes'; expected true or false"),
        (AWQ, {"q_group_size": 64}, r"layer\.scales: has shape \[3, 64\]; expected \[2, 64\]"),
        (AWQ, {"q_group_size": 40, "dynamic": {"x": {"group_size": 32}}}, "several of the group"),
        (AWQ, {"q_group_size": 0}, "group_size is 0; expected -1 or more than 0"),
        (MARLIN, {"bits": 8}, "bits is 8; Marlin files have 4"),
        (MARLIN, {"sym": False}, "sym is False; Marlin files have True"),
        (MARLIN, {"group_size": 64}, r"layer\.s: has shape \[2, 256\]; expected \[4, 256\]"),
        (MARLIN, {"group_size": "128"}, "group_size is '128'; expected -1 or more than 0"),
        (CT, {"format": "int-quantized"}, "holds compressed-tensors, int-quantized"),
        (CT, {"format": "marlin-24"}, "holds compressed-tensors, marlin-24"),
        (CT, {"format": "new-format"}, "format is 'new-format', which is unknown"),
        (CT, {"quantization_status": "calibration"}, "quantization_status is 'calibration'"),
        (CT, {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config is set"),
        (CT, {"transform_config": {"R1": {}}}, "transform_config is set, which changes"),
        (CT, {"config_groups": {}}, "config_groups is {}; expected"),
        (CT, {"config_groups": {"g": 3}}, "config_groups.g is 3; expected an object"),
        (CT, {"config_groups": group(num_bits=3)}, "has num_bits 3; 4 and 8 are loaded"),
        (CT, {"config_groups": group(type="float")}, "type 'float'; weights of type int"),
        (CT, {"config_groups": group(strategy="block")}, "strategy 'block'; group, channel"),
        (CT, {"config_groups": group(group_size=0)}, "has group_size 0; expected"),
        (CT, {"config_groups": group(symmetric="no")}, "has symmetric 'no'"),
        (CT, {"config_groups": group(symmetric=True)}, "with weight_zero_point, without weight_g"),
        (CT, {"config_groups": group(group_size=64)}, "4 groups of 32 along k = 128"),
        (CT, {"config_groups": group(num_bits=8)}, "with 8 bits does not match"),
        (CT, {"config_groups": {"g": group()["group_0"] | {"input_activations": {}}}},
         r"quantizes activations \(input_activations\), which is not loaded"),
        (CT, {"config_groups": {"g": group()["group_0"] | {"output_activations": {}}}},
         r"quantizes activations \(output_activations\), which is not loaded"),
        (CT, {"config_groups": {"g": group()["group_0"] | {"format": "float-quantized"}}},
         "has format 'float-quantized'; pack-quantized is loaded"),
    ],
)  # fmt: skip
def test_a_setting_that_is_not_loaded_is_named(
    vector: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        loaded(edited(tmp_path, vector, **settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"config_groups": {"W4A16_ASYM": ["Linear"]}},
        {"config_groups": {"a": group(num_bits=8)["group_0"], "b": group()["group_0"]}},
        {"config_groups": group(actorder="weight", observer="mse")},
        {"sparsity_config": {"format": "dense"}, "quantization_status": None},
    ],
)
def test_other_ways_to_say_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = loaded(edited(tmp_path, CT, **settings))
    assert weight_hash(checkpoint.load("layer")) == weight_hashes(CT)["layer"]


@pytest.mark.parametrize("vector", [CT, INT8_ZEROS, MARLIN, ORDERED])
def test_two_formats_load_without_a_configuration(vector: str, tmp_path: Path) -> None:
    folder = edited(tmp_path, vector)
    for path in folder.glob("*.json"):
        path.unlink()
    checkpoint = loaded(folder)
    hashes = {s.module: weight_hash(checkpoint.load(s.module)) for s in checkpoint.layers}
    assert hashes == weight_hashes(vector)


def test_zero_points_in_the_middle_beside_symmetric_codes_are_ignored(tmp_path: Path) -> None:
    vector = "ct-layer-n1000-k128-g128-sym"
    middle = torch.zeros(1000, 1, dtype=torch.int8)
    folder = edited(tmp_path / "a", vector, {"weight_zero_point": middle})
    layer = loaded(folder).load("layer")
    assert layer.spec.symmetric
    assert weight_hash(layer) == weight_hashes(vector)["layer"]
    with pytest.raises(CheckpointError, match="with weight_zero_point, without weight_g_idx, but"):
        loaded(edited(tmp_path / "b", vector, {"weight_zero_point": middle + 1}))


def test_one_zero_point_for_the_whole_layer(tmp_path: Path) -> None:
    vector = "ct-layer-n128-k256-tensor-sym"
    groups = group(strategy="tensor", group_size=None)
    for offset in (0, 3):
        zero = torch.tensor([offset], dtype=torch.int8)
        folder = edited(tmp_path, vector, {"weight_zero_point": zero}, config_groups=groups)
        layer = loaded(folder).load("layer")
        assert (layer.zeros is None) == (offset == 0)
        assert layer.zeros is None or layer.zeros.unique().tolist() == [8 + offset]


def test_signed_zero_points_of_eight_bits_take_their_whole_range(tmp_path: Path) -> None:
    vector = "ct-layer-n128-k512-g128-sym-w8-bf16"
    zeros = torch.arange(-128, 384).view(128, 4).clamp(max=127).to(torch.int8)
    groups = group(num_bits=8, group_size=128)
    folder = edited(tmp_path, vector, {"weight_zero_point": zeros}, config_groups=groups)
    layer = loaded(folder).load("layer")
    assert layer.zeros is not None
    assert torch.equal(layer.zeros.T.int(), zeros.int() + 128)


@pytest.mark.parametrize("features", [1, 65])
def test_a_slab_may_be_a_single_output_feature(features: int, tmp_path: Path) -> None:
    vector = "ct-layer-n1000-k128-g128-sym"
    stored = load_file(VECTORS / vector / "model.safetensors")
    parts = {s: stored[f"layer.{s}"][:features].clone() for s in ("weight_packed", "weight_scale")}
    shape = torch.tensor([features, 128])
    checkpoint = loaded(edited(tmp_path, vector, {**parts, "weight_shape": shape}))
    last = checkpoint.load("layer", features - 1, features)
    whole = open_checkpoint(VECTORS / vector).load("layer")
    assert torch.equal(last.codes, whole.codes[:, features - 1 : features])


def test_a_group_size_that_does_not_divide_k_is_refused(tmp_path: Path) -> None:
    """Two equal groups of 192 would be a guess: the configuration says 256 and 128."""
    vector = "ct-old06-layer-n128-k384-g128-asym-int8-zp"
    parts: dict[str, torch.Tensor | None] = {
        "weight_scale": torch.ones(128, 2, dtype=HALF),
        "weight_zero_point": torch.ones(128, 2, dtype=torch.int8),
    }
    with pytest.raises(CheckpointError, match=r"2 groups of 192 along k = 384, .*group_size 256"):
        loaded(edited(tmp_path, vector, parts, config_groups=group(group_size=256)))


def test_an_order_of_minus_ones_is_none(tmp_path: Path) -> None:
    folder = edited(tmp_path, CT, {"weight_g_idx": torch.full((128,), -1).int()})
    layer = loaded(folder).load("layer")
    assert not layer.spec.has_k_permutation
    assert weight_hash(layer) == weight_hashes(CT)["layer"]


def test_columns_that_may_be_padding_are_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scales = load_file(VECTORS / MARLIN / "model.safetensors")["layer.s"]
    scales[:, 192:] = 0
    checkpoint = loaded(edited(tmp_path, MARLIN, {"s": scales}))
    assert checkpoint.layers[0].n == 256
    assert "columns_of_zeros module=layer" in caplog.text
    caplog.clear()
    loaded(VECTORS / MARLIN)
    assert not caplog.text


def test_an_order_that_is_announced_but_not_there_is_missed(tmp_path: Path) -> None:
    for actorder in (True, "group", "dynamic"):
        groups = group(actorder=actorder)
        with pytest.raises(
            CheckpointError, match=r"without weight_g_idx, .* asymmetric, act-order;"
        ):
            loaded(edited(tmp_path, CT, config_groups=groups))
        order = torch.arange(128, dtype=torch.int32).flip(0) // 32
        layer = loaded(edited(tmp_path, CT, {"weight_g_idx": order}, config_groups=groups))
        assert layer.layers[0].has_k_permutation
    channel = group(num_bits=4, strategy="channel", group_size=None, actorder="group")
    loaded(edited(tmp_path, "ct-layer-n64-k1024-channel-asym", config_groups=channel))


@pytest.mark.parametrize(("base", "stray"), [(CT, AWQ), (AWQ, CT), (AWQ, MARLIN)])
def test_a_module_of_another_format_is_named(base: str, stray: str, tmp_path: Path) -> None:
    folder = edited(tmp_path, base)
    other = load_file(VECTORS / stray / "model.safetensors")
    save_file({f"other.{name}": t for name, t in other.items()}, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.layer\.\w+: is not part of the format that"):
        open_checkpoint(folder)
