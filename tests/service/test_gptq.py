"""GPTQ checkpoints of real tools dequantize to the last bit, whatever they leave out."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import (
    LOADED,
    SMALL,
    VECTORS,
    gptq_tensors,
    weight_hash,
    weight_hashes,
    write_checkpoint,
)

from qlinear_service.checkpoints import open_checkpoint
from qlinear_service.checkpoints.words import unpack_words
from qlinear_service.dtypes import DType
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels.reference import dequantize, linear


@pytest.mark.parametrize("vector", LOADED)
def test_every_weight_of_a_real_file_is_exact(vector: str) -> None:
    checkpoint = open_checkpoint(VECTORS / vector)
    hashes = {spec.module: weight_hash(checkpoint.load(spec.module)) for spec in checkpoint.layers}
    assert hashes == weight_hashes(vector)


@pytest.mark.parametrize("vector", [v for v in LOADED if (VECTORS / v / "reference.npz").exists()])
def test_outputs_and_biases_agree_with_the_tools(vector: str) -> None:
    checkpoint = open_checkpoint(VECTORS / vector)
    reference = np.load(VECTORS / vector / "reference.npz")
    for spec in checkpoint.layers:
        layer = checkpoint.load(spec.module)
        stored_bias = f"{spec.module}.bias" in reference
        expected = reference[f"{spec.module}.{'y_bias' if stored_bias else 'y'}"]
        if stored_bias:
            assert layer.bias is not None
            np.testing.assert_array_equal(
                layer.bias.float().numpy(), reference[f"{spec.module}.bias"]
            )
        x = torch.from_numpy(reference[f"{spec.module}.x"])
        y = linear(layer, x, output_dtype=DType.F32, precision=torch.float64)
        np.testing.assert_allclose(y.double().numpy(), expected, rtol=1e-6, atol=1e-6)


def test_layers_come_in_the_order_of_the_model(tmp_path: Path) -> None:
    tensors = {k: v for i in (10, 9, 2) for k, v in gptq_tensors(f"layer.{i}.dense").items()}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors), model="m")
    assert [spec.name for spec in checkpoint.layers] == [
        "m/layer.2.dense", "m/layer.9.dense", "m/layer.10.dense",
    ]  # fmt: skip


def test_a_spec_says_what_the_file_says() -> None:
    checkpoint = open_checkpoint(VECTORS / "gptq-gptqmodel-v1-phi3-fused-sharded", model="phi")
    spec = next(s for s in checkpoint.layers if s.module.endswith("0.self_attn.qkv_proj"))
    assert (spec.n, spec.k, spec.bits, spec.group_size, spec.symmetric) == (256, 128, 4, 128, True)
    assert (spec.has_bias, spec.scale_dtype) == (False, DType.F16)
    assert (spec.source.tool, spec.source.format) == ("gptqmodel:7.7.0", "gptq")
    assert checkpoint.stored_bytes(spec.module) == 128 // 8 * 256 * 4 + 256 // 2 + 256 * 2 + 128 * 4


def test_what_is_not_served_is_named() -> None:
    reasons = dict(open_checkpoint(VECTORS / "gptq-autogptq-w4-g128-sym").skipped)
    assert "embedding" in reasons["model.embed_tokens.weight"]
    assert "not quantized" in reasons["lm_head.weight"]
    assert "norm" in reasons["model.norm.weight"]


@pytest.mark.parametrize(("label", "stored"), [("gptq", 8), ("gptq_v2", 7)])
def test_mislabelled_zero_points_are_believed_and_logged(
    label: str, stored: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = {"gptq": 7, "gptq_v2": 8}[label]
    plain = open_checkpoint(write_checkpoint(tmp_path / "a", gptq_tensors(zero=right)))
    expected = weight_hash(plain.load("layer"))
    folder = write_checkpoint(tmp_path / "b", gptq_tensors(zero=stored), checkpoint_format=label)
    with caplog.at_level(logging.WARNING):
        assert weight_hash(open_checkpoint(folder).load("layer")) == expected
    assert "module=layer" in caplog.text
    assert f"stored={stored}" in caplog.text


def test_the_published_mislabelled_case_equals_its_source() -> None:
    checkpoint = open_checkpoint(VECTORS / "malformed" / "mislabelled-v2-zeros")
    assert weight_hash(checkpoint.load("layer")) == weight_hashes(SMALL)["layer"]


@pytest.mark.parametrize("zero", [7, 8])
def test_symmetry_is_found_out_where_the_file_does_not_say(zero: int, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, gptq_tensors(zero=zero), sym=None)
    assert open_checkpoint(folder).layers[0].symmetric


def test_asymmetric_zero_points_are_refused_even_if_the_file_does_not_say(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, gptq_tensors(zero=5), sym=None)
    with pytest.raises(CheckpointError, match=r"layer\.qzeros.* is 5; symmetric codes have 7"):
        open_checkpoint(folder)


def test_g_idx_and_bias_may_be_absent(tmp_path: Path) -> None:
    tensors = gptq_tensors()
    with_both = open_checkpoint(write_checkpoint(tmp_path / "a", tensors)).load("layer")
    bare = {name: t for name, t in tensors.items() if not name.endswith(("g_idx", "bias"))}
    folder = write_checkpoint(
        tmp_path / "b",
        bare,
        quant_method="auto-round",
        packing_format="auto_round:auto_gptq",
        autoround_version="0.15.1",
    )
    layer = open_checkpoint(folder).load("layer")
    assert layer.bias is None
    assert weight_hash(layer) == weight_hash(with_both)
    assert layer.spec.source.tool == "auto-round:0.15.1"
    assert layer.spec.source.format == "auto_round:auto_gptq"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_and_biases_keep_their_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = gptq_tensors()
    for name in ("layer.scales", "layer.bias"):
        tensors[name] = tensors[name].to(dtype)
    layer = open_checkpoint(write_checkpoint(tmp_path, tensors)).load("layer")
    assert layer.scales.dtype == dtype
    assert layer.bias is not None
    assert layer.bias.dtype == dtype
    assert torch.equal(layer.scales, tensors["layer.scales"])


@pytest.mark.parametrize(
    ("k", "stored", "normalised"),
    [
        (64, 64, 64),
        (96, 128, 128),  # one short group of a size that kernels have
        (96, 64, 64),  # the last of two groups is short
        (96, 96, -1),  # one group of another size is the whole column
        (256, 512, -1),
        (64, -1, -1),
    ],
)
def test_group_sizes_are_normalised(k: int, stored: int, normalised: int, tmp_path: Path) -> None:
    tensors = gptq_tensors(k=k, group_size=stored)
    layer = open_checkpoint(write_checkpoint(tmp_path, tensors, group_size=stored)).load("layer")
    assert layer.spec.group_size == normalised
    scales = layer.scales.float()[torch.arange(k) // (k if stored == -1 else stored)]
    codes = unpack_words(tensors["layer.qweight"], bits=4).reshape(k, -1).float()
    assert torch.equal(dequantize(layer), ((codes - 8) * scales).T)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_unpack_lowest_bits_first(bits: int) -> None:
    words = torch.tensor([[0x76543210, -0x76543211]], dtype=torch.int32)  # the second is 0x89ABCDEF
    digits = {4: [*range(8)], 8: [0x10, 0x32, 0x54, 0x76]}[bits]
    top = {4: 15, 8: 255}[bits]
    unpacked = unpack_words(words, bits=bits)
    assert unpacked[0, :, 0].tolist() == digits
    assert unpacked[0, :, 1].tolist() == [top - digit for digit in digits]
