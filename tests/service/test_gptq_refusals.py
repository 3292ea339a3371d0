"""GPTQ checkpoints with a fault, or of a kind that is not loaded, are refused by name."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, VECTORS, gptq_tensors, weight_hash, weight_hashes, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from qlinear_service.checkpoints import open_checkpoint
from qlinear_service.errors import CheckpointError


def load_all(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for spec in checkpoint.layers:
        checkpoint.load(spec.module)


def without(suffix: str) -> dict[str, torch.Tensor]:
    return {name: t for name, t in gptq_tensors().items() if not name.endswith(suffix)}


def changed(suffix: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return gptq_tensors() | {f"layer.{suffix}": tensor}


def spoiled(suffix: str, place: tuple[int, ...], value: float) -> dict[str, torch.Tensor]:
    tensors = gptq_tensors()
    tensors[f"layer.{suffix}"][place] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without("scales"), r"layer\.scales: is missing beside layer\.bias, layer\.g_idx, layer"),
        (without("qweight"), r"is said to hold gptq, but no tensor of it does"),
        (without("qweight") | gptq_tensors("b"), r"layer\.qzeros: has no layer\.qweight beside it"),
        (changed("weight", torch.zeros(16, 64)), r"layer\.weight: stands beside a qweight"),
        (changed("qweight", torch.zeros(8, 16)), r"layer\.qweight: has dtype F32; expected I32"),
        (changed("qzeros", torch.zeros(2, 2).long()), r"layer\.qzeros: has dtype I64"),
        (changed("scales", torch.zeros(2, 16).int()), r"layer\.scales: has dtype I32; expected F1"),
        (changed("scales", torch.ones(3, 16).half()), r"layer\.scales: has shape \[3, 16\]; exp"),
        (changed("qzeros", torch.zeros(2, 1).int()), r"layer\.qzeros: has shape \[2, 1\]; expect"),
        (changed("bias", torch.zeros(8).half()), r"layer\.bias: has shape \[8\]; expected \[16\]"),
        (changed("qweight", torch.zeros(0, 16).int()), r"layer\.qweight: has shape \[0, 16\]"),
        (changed("g_idx", torch.zeros(60).int()), r"layer\.g_idx: has shape \[60\]"),
        (spoiled("g_idx", (5,), 1), r"layer: group 0 has 31 input features; expected multiples"),
        (spoiled("g_idx", (5,), 2), r"g_idx\[5\] = 2; expected a group in 0 \.\. 1"),
        (spoiled("g_idx", (6,), -1), r"g_idx\[6\] = -1; expected a group in 0 \.\. 1"),
        (spoiled("scales", (1, 3), torch.inf), r"layer\.scales: group 1, column 3 is inf"),
        (spoiled("bias", (4,), torch.nan), r"layer\.bias: column 4 is nan"),
        (spoiled("qzeros", (1, 1), 0x77777977), r"group 1, column 10 is 9, but .* 7 every"),
    ],
)
def test_a_faulty_tensor_is_named(
    tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_all(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bits": 3}, "bits is 3; 4 and 8 are loaded"),
        ({"bits": 2}, "bits is 2; 4 and 8 are loaded"),
        ({"bits": "4"}, "bits is '4'; expected an integer"),
        ({"bits": None}, "bits is None; expected an integer"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": -2}, "group_size is -2"),
        ({"group_size": True}, "group_size is True; expected an integer"),
        ({"sym": "yes"}, "sym is 'yes'"),
        ({"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp'"),
        ({"act_bits": 8}, "act_bits is 8"),
        ({"adapter": {"name": "lora"}}, "adapter is set"),
        ({"rotation": "hadamard"}, "rotation is set"),
        ({"dynamic": {"lm_head": 8}}, "dynamic has 8 for 'lm_head'; expected a JSON object"),
        ({"dynamic": [1]}, r"dynamic is \[1\]"),
    ],
)
def test_a_setting_that_is_not_loaded_is_named(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"quantize_config.json: {message}"):
        open_checkpoint(write_checkpoint(tmp_path, **values))


def test_patterns_of_modules_left_alone_do_no_harm(tmp_path: Path) -> None:
    tensors = gptq_tensors() | {"o_proj.weight": torch.zeros(4, 4)}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, dynamic={"-:.*o_proj": {}}))
    assert [spec.module for spec in checkpoint.layers] == ["layer"]


def test_a_module_that_no_setting_fits_is_named_with_all_of_them(tmp_path: Path) -> None:
    tensors = gptq_tensors("a") | gptq_tensors("b", k=128, group_size=64)
    dynamic = {"+:b": {"bits": 8, "group_size": 64}, "c": {"bits": 3}}
    folder = write_checkpoint(tmp_path, tensors, dynamic=dynamic)
    with pytest.raises(CheckpointError, match=r"b: fits none of the settings .*4 bits, group_siz"):
        open_checkpoint(folder)
    dynamic = {"+:b": {"bits": 4, "group_size": 64}}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, dynamic=dynamic))
    assert [(s.module, s.group_size) for s in checkpoint.layers] == [("a", 32), ("b", 64)]


def test_a_pattern_that_would_take_for_ever_is_not_run(tmp_path: Path) -> None:
    module = "a" * 40
    folder = write_checkpoint(
        tmp_path, gptq_tensors(module), dynamic={"(a+)+$x": {"bits": 8}, "-:(a|a)*b": {}}
    )
    assert [spec.module for spec in open_checkpoint(folder).layers] == [module]


def test_without_g_idx_group_sizes_must_be_told_apart(tmp_path: Path) -> None:
    tensors = gptq_tensors(k=96, group_size=64)
    del tensors["layer.g_idx"]
    made = {"group_size": 64, "dynamic": {"x": {"group_size": 48}}}
    with pytest.raises(CheckpointError, match=r"layer: fits several group sizes \(4 bits, group"):
        open_checkpoint(write_checkpoint(tmp_path, tensors, **made))


@pytest.mark.parametrize(("zeros", "words"), [((2, 1), 2), ((2, 124), 125)])
def test_zero_points_that_a_tool_cut_short_are_refused(
    zeros: tuple[int, int], words: int, tmp_path: Path
) -> None:
    n = 8 * words
    tensors = gptq_tensors(n=n) | {"layer.qzeros": torch.zeros(zeros, dtype=torch.int32)}
    with pytest.raises(
        CheckpointError, match=rf"layer\.qzeros: has shape .*expected \[2, {words}\]"
    ):
        open_checkpoint(write_checkpoint(tmp_path, tensors))


def test_group_size_that_kernels_lack_is_refused(tmp_path: Path) -> None:
    tensors = gptq_tensors(k=96, group_size=48)
    del tensors["layer.g_idx"]
    folder = write_checkpoint(tmp_path, tensors, group_size=48)
    with pytest.raises(CheckpointError, match="layer: group_size is 48; expected a mul"):
        open_checkpoint(folder)


def test_a_foreign_tensor_of_a_served_module_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, changed("perm", torch.zeros(4)))
    with caplog.at_level(logging.WARNING):
        reasons = dict(open_checkpoint(folder).skipped)
    assert "not part of the format" in reasons["layer.perm"]
    assert "layer.perm" in caplog.text


def test_a_tensor_that_the_index_does_not_place_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path, gptq_tensors() | {"stray": torch.zeros(1)}, name="1.safetensors"
    )
    weight_map = dict.fromkeys(gptq_tensors(), "1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    reasons = dict(open_checkpoint(folder).skipped)
    assert reasons == {"stray in 1.safetensors": "the index does not place it there"}


MALFORMED = sorted(path.name for path in (VECTORS / "malformed").iterdir())
# What the sentence must name, where vector.json expects a refusal.
NAMED = {
    "bits-8-on-4bit-tensors": r"layer\.g_idx: has shape \[96\]; expected \[48\].* with 8 bits",
    "config-not-json": "is not valid JSON",
    "ct-weight-shape-lies": r"says \[64, 4096\], .* match layer.weight_packed \[64, 16\]",
    "dtype-qweight-f32": r"layer\.qweight: has dtype F32; expected I32",
    "empty-file": r"gptq_model-4bit-32g\.safetensors: has 0 bytes",
    "gidx-negative": r"layer\.g_idx: g_idx\[3\] = -1",
    "gidx-out-of-range": r"layer\.g_idx: g_idx\[17\] = 4",
    "group-size-contradicts-scales": r"layer\.scales: has shape \[3, 64\]; expected \[2, 64\]",
    "group-size-zero": "group_size is 0",
    "header-length-huge": "announce a header of 4611686018427387904 bytes but 4288 follow",
    "index-path-traversal": r"names the file '\.\./outside\.safetensors'",
    "missing-qzeros": r"layer\.qzeros: is missing",
    "offsets-overlap": r"layer\.scales: its data_offsets overlap",
    "scales-inf": r"layer\.scales: group 0, column 3 is inf",
    "scales-nan": r"layer\.scales: group 1, column 7 is nan",
    "shape-qweight-short-k": r"layer\.g_idx: has shape \[96\]; expected \[88\]",
    "shard-missing": "its shard model-00002-of-00002.safetensors is not in the folder",
    "truncated-in-data": "has 2577 bytes; its header describes 4296",
    "truncated-in-header": "announce a header of 352 bytes but 112 follow",
    "unknown-checkpoint-format": "checkpoint_format is 'gptq_v9', which is unknown",
    "unknown-quant-method": "quant_method is 'fooquant', which is unknown",
    "zero-groups": r"layer\.scales: has shape \[0, 64\]; expected \[3, 64\]",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_load_exactly_or_are_refused_in_one_sentence(case: str) -> None:
    folder = VECTORS / "malformed" / case
    vector = json.loads((folder / "vector.json").read_text())
    if vector["expect"].startswith("load"):
        layer = open_checkpoint(folder).load("layer")
        assert weight_hash(layer) == weight_hashes(SMALL)["layer"]
        return
    with pytest.raises(CheckpointError) as caught:
        load_all(folder)
    sentence = str(caught.value)
    assert sentence.startswith(str(folder))
    assert "\n" not in sentence
    assert re.search(NAMED[case], sentence)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damage_anywhere_loads_or_is_one_clean_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    write_checkpoint(folder)
    path = folder / data.draw(st.sampled_from(["model.safetensors", "quantize_config.json"]))
    content = bytearray(path.read_bytes())
    content = content[: data.draw(st.integers(0, len(content)), label="length")]
    for _ in range(data.draw(st.integers(0, 3), label="flips") if content else 0):
        position = data.draw(st.integers(0, len(content) - 1), label="byte")
        content[position] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    path.write_bytes(content)
    sentence = f"{folder}: loads all the same"
    try:
        load_all(folder)
    except CheckpointError as error:
        sentence = str(error)
    assert sentence.startswith(str(folder))
    assert sentence.isprintable()


def test_an_order_that_is_announced_but_not_there_is_missed(tmp_path: Path) -> None:
    tensors = without("g_idx")
    with pytest.raises(CheckpointError, match=r"layer\.g_idx: is missing .* desc_act is true"):
        open_checkpoint(write_checkpoint(tmp_path, tensors, desc_act=True))
    open_checkpoint(write_checkpoint(tmp_path, tensors, desc_act=True, static_groups=True))
    one = {name: t for name, t in gptq_tensors(group_size=-1).items() if "g_idx" not in name}
    open_checkpoint(write_checkpoint(tmp_path, one, desc_act=True, group_size=-1))


def test_a_zero_point_that_eight_bits_cannot_hold_is_named(tmp_path: Path) -> None:
    """v1 says 255 for 256; in a byte it would become 0. The place is that of the whole layer."""
    zeros = torch.full((2, 24), 0x7F7F7F7F).int()
    zeros[1, 17] = -1
    tensors = {
        "layer.qweight": torch.zeros(16, 96).int(), "layer.qzeros": zeros,
        "layer.scales": torch.ones(2, 96).half(),
    }  # fmt: skip
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, bits=8, sym=False))
    with pytest.raises(CheckpointError, match="group 1, column 68 is 255, which v1 means as 256"):
        checkpoint.load("layer", 64, 96)
    tensors["layer.scales"][1, 70] = torch.nan
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors, bits=8, sym=False))
    with pytest.raises(CheckpointError, match=r"layer\.scales: group 1, column 70 is nan"):
        checkpoint.load("layer", 64, 96)
