"""GPTQ checkpoints of real tools dequantize to the last bit, whatever they leave out."""

import logging
from pathlib import Path

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

from qlinear_service.checkpoints import open_checkpoint
from qlinear_service.checkpoints.words import unpack_columns, unpack_rows
from qlinear_service.dtypes import DType
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels.packing import pack
from qlinear_service.kernels.reference import dequantize


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


def spread_zeros(tensors: dict[str, torch.Tensor], stored: torch.Tensor) -> None:
    """Store such zero points, int [groups, n], in 4-bit words along n."""
    words = torch.zeros(stored.shape[0], stored.shape[1] // 8, dtype=torch.int64)
    for slot in range(8):
        words |= stored[:, slot::8].long() << 4 * slot
    tensors["layer.qzeros"] = words.to(torch.int32)  # wraps as files do


@pytest.mark.parametrize(("label", "plus"), [("gptq", 1), ("gptq_v2", 0)])
def test_asymmetric_zero_points_are_read_by_their_label(
    label: str, plus: int, tmp_path: Path
) -> None:
    tensors = gptq_tensors()
    stored = torch.arange(32).view(2, 16) % 15
    spread_zeros(tensors, stored)
    folder = write_checkpoint(tmp_path, tensors, sym=False, checkpoint_format=label)
    layer = open_checkpoint(folder).load("layer")
    assert not layer.spec.symmetric
    assert layer.zeros is not None
    assert torch.equal(layer.zeros.long(), stored + plus)


def test_a_stored_15_means_16_except_where_words_were_subtracted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    zeros = torch.tensor([[0, 3, 0, 0, 15, 1, 2, 0, 9, 0, 1, 0, 7, 7, 7, 0]] * 2)
    tensors = gptq_tensors()
    spread_zeros(tensors, zeros)
    # As GPTQModel does: one from every nibble of a word at once, borrows included.
    tensors["layer.qzeros"] = (tensors["layer.qzeros"].long() - 0x11111111).to(torch.int32)
    made = {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    folder = write_checkpoint(tmp_path / "word", tensors, sym=False, **made)
    layer = open_checkpoint(folder).load("layer")
    assert layer.zeros is not None
    assert torch.equal(layer.zeros.long(), zeros)
    assert "zero_points_beyond_codes" not in caplog.text
    spread_zeros(tensors, torch.where(zeros == 0, 15, zeros - 1))
    folder = write_checkpoint(tmp_path / "slot", tensors, sym=False)
    layer = open_checkpoint(folder).load("layer")
    assert layer.zeros is not None
    assert torch.equal(layer.zeros.long(), torch.where(zeros == 0, 16, zeros))
    assert "zero_points_beyond_codes module=layer" in caplog.text
    scales = layer.scales.float()[torch.arange(64) // 32]
    codes = unpack_rows(tensors["layer.qweight"], bits=4).float()
    wide = layer.zeros.float()[torch.arange(64) // 32]
    assert torch.equal(dequantize(pack(layer)), ((codes - wide) * scales).T)


def test_asymmetry_is_found_out_where_the_file_does_not_say(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, gptq_tensors(zero=5), sym=None)
    layer = open_checkpoint(folder).load("layer")
    assert layer.zeros is not None
    assert layer.zeros.unique().tolist() == [6]


def test_act_order_sorts_by_group_and_keeps_the_product(tmp_path: Path) -> None:
    tensors = gptq_tensors(k=96)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    tensors["layer.g_idx"] = (torch.arange(96)[order] // 32).int()
    layer = open_checkpoint(write_checkpoint(tmp_path, tensors)).load("layer")
    assert layer.spec.has_k_permutation
    assert layer.k_permutation is not None
    assert layer.k_permutation.dtype == torch.int32
    scales = tensors["layer.scales"].float()[tensors["layer.g_idx"].long()]
    codes = unpack_rows(tensors["layer.qweight"], bits=4).float()
    assert torch.equal(dequantize(pack(layer)), ((codes - 8) * scales).T)


@pytest.mark.parametrize(
    ("counts", "group_size"),
    [((64, 32, 96), 32), ((128, 64), 128), ((64, 128), 64), ((128, 128, 40), 128)],
)
def test_groups_of_other_lengths_load_if_blocks_fit(
    counts: tuple[int, ...], group_size: int, tmp_path: Path
) -> None:
    """Old files have groups of other lengths than they say: only the formula counts."""
    k = sum(counts)
    tensors = gptq_tensors(k=k, group_size=-(-k // len(counts)))
    index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    index = index[torch.randperm(k, generator=torch.Generator().manual_seed(2))]
    tensors["layer.g_idx"] = index.int()
    folder = write_checkpoint(tmp_path, tensors, group_size=-(-k // len(counts)))
    layer = open_checkpoint(folder).load("layer")
    assert layer.spec.group_size == group_size
    codes = unpack_rows(tensors["layer.qweight"], bits=4).float()
    expected = (codes - 8) * tensors["layer.scales"].float()[index]
    assert torch.equal(dequantize(pack(layer)), expected.T)


@pytest.mark.parametrize("used", [(0, 0, 0), (1, 1, 1), (0, 1, 1), (2, 0, 0)])
def test_groups_without_any_feature_are_left_out(used: tuple[int, ...], tmp_path: Path) -> None:
    tensors = gptq_tensors(k=96)
    index = torch.tensor(used).repeat_interleave(32)
    tensors["layer.g_idx"] = index.int()
    layer = open_checkpoint(write_checkpoint(tmp_path, tensors)).load("layer")
    codes = unpack_rows(tensors["layer.qweight"], bits=4).float()
    expected = (codes - 8) * tensors["layer.scales"].float()[index]
    assert torch.equal(dequantize(pack(layer)), expected.T)


def test_groups_that_no_block_fits_are_refused(tmp_path: Path) -> None:
    tensors = gptq_tensors()
    tensors["layer.g_idx"][3] = 1
    folder = write_checkpoint(tmp_path, tensors)
    with pytest.raises(CheckpointError, match="layer: group 0 has 31 input features; expected mul"):
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
        (384, 256, 128),  # larger groups become several with the same scale
        (384, 192, 64),
        (192, 96, 32),
        (256, 512, -1),
        (64, -1, -1),
    ],
)
def test_group_sizes_are_normalised(k: int, stored: int, normalised: int, tmp_path: Path) -> None:
    tensors = gptq_tensors(k=k, group_size=stored)
    layer = open_checkpoint(write_checkpoint(tmp_path, tensors, group_size=stored)).load("layer")
    assert layer.spec.group_size == normalised
    scales = tensors["layer.scales"].float()[torch.arange(k) // (k if stored == -1 else stored)]
    codes = unpack_rows(tensors["layer.qweight"], bits=4).float()
    assert torch.equal(dequantize(layer), ((codes - 8) * scales).T)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_unpack_lowest_bits_first(bits: int) -> None:
    words = torch.tensor([[0x76543210, -0x76543211]], dtype=torch.int32)  # the second is 0x89ABCDEF
    digits = {4: [*range(8)], 8: [0x10, 0x32, 0x54, 0x76]}[bits]
    top = {4: 15, 8: 255}[bits]
    unpacked = unpack_rows(words, bits=bits)
    assert unpacked[:, 0].tolist() == digits
    assert unpacked[:, 1].tolist() == [top - digit for digit in digits]
    along = unpack_columns(words, bits=bits)
    assert along.tolist() == [digits + [top - digit for digit in digits]]


def test_columns_can_lie_in_any_slot() -> None:
    words = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert unpack_columns(words, bits=4, slot_of=(0, 4, 1, 5, 2, 6, 3, 7)).tolist() == [
        [0, 4, 1, 5, 2, 6, 3, 7]
    ]
