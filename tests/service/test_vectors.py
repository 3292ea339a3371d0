"""Files of every tool: loaded to the last bit, or refused in a sentence that says what they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    EXPECTED,
    LOADED,
    PLAIN,
    VECTORS,
    packed_layers,
    weight_hash,
    weight_hashes,
)

from qlinear_service.checkpoints import open_checkpoint
from qlinear_service.dtypes import DType
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels import packing
from qlinear_service.kernels.reference import linear

REFUSED = {
    "optional-awq-autoawq-layer-gemv-n128-k256-g64": "holds AWQ, version gemv; GPTQ, AWQ .gemm.",
    "optional-bnb-nf4": "holds bitsandbytes; GPTQ",
    "optional-hqq-w4-g64-axis1": "holds hqq; GPTQ",
    "optional-torchao-int4-g32": "holds torchao; GPTQ",
    "reject-ct-llmcompressor-w8a8-int-quantized": "holds compressed-tensors, int-quantized",
    "reject-gptq-autogptq-pickle-bin": r"4bit-128g\.bin: is a pickle .* convert the checkpoint to",
    "reject-gptq-autogptq-w3-g128": "bits is 3; 4 and 8 are loaded",
}


def described(vector: str) -> dict[str, Any]:
    """What the vector says of each of its modules."""
    modules: dict[str, Any] = json.loads((VECTORS / vector / "vector.json").read_text())["modules"]
    return modules


def test_every_vector_has_its_place() -> None:
    assert sorted((*LOADED, *PLAIN, *REFUSED)) == sorted(EXPECTED)
    assert len(EXPECTED) == 59


@pytest.mark.parametrize("vector", LOADED)
def test_every_weight_of_a_real_file_is_exact(vector: str) -> None:
    layers = packed_layers(VECTORS / vector)
    assert {x.spec.module: weight_hash(x) for x in layers} == weight_hashes(vector)


def test_awq_files_hold_zero_points_of_zero() -> None:
    """Or the exactness of these files would say nothing of a reader that subtracts one."""
    checkpoint = open_checkpoint(VECTORS / "awq-autoawq-layer-n64-k1024-g32")
    zeros = checkpoint.load("layer").zeros
    assert zeros is not None
    assert {0, 15} <= set(zeros.unique().tolist())


@pytest.mark.parametrize("vector", LOADED)
def test_slabs_of_a_layer_are_the_layer(vector: str) -> None:
    """Output features are read some at a time: every code, scale, zero point, bias."""
    checkpoint = open_checkpoint(VECTORS / vector)
    for spec in checkpoint.layers:
        whole = checkpoint.load(spec.module)
        for begin in range(0, spec.n, 192):
            end = min(begin + 192, spec.n)
            slab = checkpoint.load(spec.module, begin, end)
            for name in ("codes", "scales", "zeros", "bias"):
                mine, its = getattr(slab, name), getattr(whole, name)
                assert (mine is None) == (its is None)
                assert its is None or torch.equal(mine, its[..., begin:end])


@pytest.mark.parametrize("vector", LOADED)
def test_sizes_bits_and_symmetry_are_those_of_the_tool(vector: str) -> None:
    told = described(vector)
    for spec in open_checkpoint(VECTORS / vector).layers:
        its = told[spec.module]
        assert (spec.n, spec.k) == (its["N"], its["K"])
        assert spec.bits == its.get("bits", spec.bits)
        assert its.get("scale_dtype", "F16") == {1: "F16", 2: "BF16", 3: "F32"}[spec.scale_dtype]


@pytest.mark.parametrize("vector", LOADED)
def test_outputs_and_biases_agree_with_the_tools(vector: str) -> None:
    checkpoint = open_checkpoint(VECTORS / vector)
    with np.load(VECTORS / vector / "reference.npz") as reference:
        for spec in checkpoint.layers:
            layer = checkpoint.load(spec.module)
            stored_bias = f"{spec.module}.bias" in reference
            expected = reference[f"{spec.module}.{'y_bias' if stored_bias else 'y'}"]
            if stored_bias:
                assert layer.bias is not None
                its = reference[f"{spec.module}.bias"]
                np.testing.assert_array_equal(layer.bias.float().numpy(), its)
            x = torch.from_numpy(reference[f"{spec.module}.x"])
            y = linear(layer, x, output_dtype=DType.F32, precision=torch.float64)
            np.testing.assert_allclose(y.double().numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vector", REFUSED)
def test_what_is_not_loaded_is_refused_by_name(vector: str) -> None:
    with pytest.raises(CheckpointError, match=REFUSED[vector]) as caught:
        open_checkpoint(VECTORS / vector)
    assert str(caught.value).startswith(str(VECTORS / vector))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("vector", PLAIN)
def test_plain_weights_are_kept_exactly_by_option(vector: str) -> None:
    layers = packed_layers(VECTORS / vector, "keep")
    assert {x.spec.module: weight_hash(x) for x in layers} == weight_hashes(vector)
    assert {x.spec.bits for x in layers} == {16}


@pytest.mark.parametrize("vector", PLAIN)
def test_plain_weights_are_quantized_to_within_half_a_scale(vector: str) -> None:
    checkpoint = open_checkpoint(VECTORS / vector)
    kept = {x.spec.module: x for x in packed_layers(VECTORS / vector, "keep")}
    assert {spec.module for spec in checkpoint.layers} == set(described(vector))
    for spec in checkpoint.layers:
        assert (spec.bits, spec.group_size, spec.source.method) == (4, 128, "rtn")
        layer = checkpoint.load(spec.module)
        weight = packing.unpack(kept[spec.module]).codes.float()
        scales = layer.scales.float()[torch.arange(spec.k) // 128]
        back = (layer.codes.float() - 8) * scales
        assert ((back - weight).abs() <= scales / 2 * (1 + 1e-6)).all()
    assert ("bias" in vector) == all(spec.has_bias for spec in checkpoint.layers)


def test_layers_left_alone_are_skipped_kept_or_quantized_by_option() -> None:
    for vector, left in (
        ("gptq-gptqmodel-v1-dynamic-mixed", {"model.layers.0.self_attn.o_proj", "lm_head"}),
        ("awq-autoawq-gemm-g32-skip-modules-sharded", {
            "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head",
        }),
        ("ct-llmcompressor-w4a16-channel-sym", {"lm_head"}),
    ):  # fmt: skip
        skipping = open_checkpoint(VECTORS / vector)
        reasons = dict(skipping.skipped)
        assert {f"{name}.weight" for name in left} <= set(reasons)
        assert all("not quantized" in reasons[f"{name}.weight"] for name in left)
        quantized = {spec.module for spec in skipping.layers}
        for treatment, bits in (("keep", 16), ("rtn", 4), ("mse", 4)):
            layers = {x.spec.module: x for x in packed_layers(VECTORS / vector, treatment)}
            assert set(layers) == quantized | left
            assert {layers[name].spec.bits for name in left} == {bits}


def test_a_recipe_with_a_tag_that_runs_code_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = VECTORS / "ct-llmcompressor-gptq-w4a16-g32-asym"
    assert "!!python/object/apply" in (vector / "recipe.yaml").read_text()
    opened: list[str] = []
    real = Path.open

    def noted(self: Path, *args: Any, **named: Any) -> Any:
        opened.append(self.name)
        return real(self, *args, **named)

    monkeypatch.setattr(Path, "open", noted)
    packed_layers(vector)
    assert set(opened) <= {"config.json", "model.safetensors"}
