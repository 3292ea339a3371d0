"""Quantizing plain weights: bounds that hold by construction, hard cases, a search that pays."""

import itertools
from pathlib import Path

import pytest
import torch
from checkpoints import VECTORS
from safetensors.torch import save_file

from qlinear_service.checkpoints import PlainOptions, open_checkpoint
from qlinear_service.checkpoints.quantize import Quantized, quantize
from qlinear_service.errors import CheckpointError
from qlinear_service.kernels import packing, reference
from qlinear_service.models import CheckpointModel, open_model

FORMS = list(itertools.product((4, 8), (32, 128, -1), (True, False)))
SMALL_GROUPS = {"bits": 4, "group_size": 32, "symmetric": True, "scale_dtype": torch.float16}


def weights(n: int = 24, k: int = 200, seed: int = 0) -> torch.Tensor:
    """Heavy tails and an outlier channel, as trained weights have them."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn((n, k), generator=draw) * 0.02
    weight[:, 7] *= 20
    return weight * torch.randn((n, k), generator=draw).abs().clamp(0.2, 3)


def dequantized(made: Quantized, bits: int, group_size: int) -> torch.Tensor:
    k = made.codes.shape[0]
    group = torch.arange(k) // (k if group_size == -1 else group_size)
    zeros = 2.0 ** (bits - 1) if made.zeros is None else made.zeros.float()[group]
    return ((made.codes.float() - zeros) * made.scales.float()[group]).T


@pytest.mark.parametrize(("bits", "group_size", "symmetric"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_weight_is_further_off_than_half_a_scale(
    bits: int, group_size: int, symmetric: bool, dtype: torch.dtype
) -> None:
    weight = weights().to(dtype).float()
    made = quantize(
        weight, bits=bits, group_size=group_size, symmetric=symmetric, scale_dtype=dtype
    )
    assert made.codes.dtype == torch.uint8
    assert made.scales.dtype == dtype
    assert (made.zeros is None) == symmetric
    k = weight.shape[1]
    scales = made.scales.float()[torch.arange(k) // (k if group_size == -1 else group_size)].T
    error = (dequantized(made, bits, group_size) - weight).abs()
    # Asymmetric: a rounded zero point moves one end of the range by up to half a scale more.
    steps = 0.5 if symmetric else 1.0
    assert (error <= scales * steps * (1 + 1e-5)).all()
    assert made.squared_error == pytest.approx(float(error.double().square().sum()), rel=1e-4)
    assert made.squares == pytest.approx(float(weight.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_hard_values_give_finite_scales(symmetric: bool, dtype: torch.dtype) -> None:
    tiny, huge = torch.finfo(dtype).smallest_normal / 64, torch.finfo(dtype).max / 4
    weight = torch.zeros(6, 64)
    weight[1, :32] = tiny * torch.arange(32)  # subnormal: a scale would underflow to zero
    weight[2, 3] = huge  # one outlier, and nothing beside it
    weight[3] = torch.linspace(-1, 1, 64) * huge
    weight[4] = huge  # one sign only
    weight[5] = -1.5
    weight = weight.to(dtype).float()
    made = quantize(weight, bits=4, group_size=32, symmetric=symmetric, scale_dtype=dtype)
    back = dequantized(made, 4, 32)
    assert torch.isfinite(made.scales).all()
    assert torch.isfinite(back).all()
    assert (back[0] == 0).all()
    scales = made.scales.float()[torch.arange(64) // 32].T
    assert ((back - weight).abs() <= scales * (0.5 if symmetric else 1.0) * (1 + 1e-3)).all()


def test_a_weight_beyond_the_scales_dtype_is_said() -> None:
    with pytest.raises(ValueError, match=r"weights up to 1e\+06 need scales beyond torch.float16"):
        quantize(torch.full((1, 32), 1e6), **SMALL_GROUPS)


@pytest.mark.parametrize(("bits", "group_size", "symmetric"), FORMS)
def test_the_search_is_never_worse_and_mostly_better(
    bits: int, group_size: int, symmetric: bool
) -> None:
    weight = weights()
    form = {
        "bits": bits, "group_size": group_size, "symmetric": symmetric,
        "scale_dtype": torch.float16,
    }  # fmt: skip
    plain, found = quantize(weight, **form), quantize(weight, **form, search=True)
    assert found.squared_error <= plain.squared_error
    if bits == 4:
        assert found.squared_error < 0.97 * plain.squared_error
    back = dequantized(found, bits, group_size)
    assert float((back - weight).double().square().sum()) == pytest.approx(
        found.squared_error, 1e-3
    )


def test_features_that_count_more_are_kept_better() -> None:
    weight, importance = weights(k=128), torch.ones(128)
    importance[::2] = 100
    plain = quantize(weight, **SMALL_GROUPS, search=True)
    aware = quantize(weight, **SMALL_GROUPS, search=True, importance=importance)

    def error(made: Quantized, part: slice) -> float:
        return float((dequantized(made, 4, 32) - weight)[:, part].square().sum())

    assert error(aware, slice(0, None, 2)) < error(plain, slice(0, None, 2))
    assert error(aware, slice(1, None, 2)) > error(plain, slice(1, None, 2))


def write_plain(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def errors_of(folder: Path, **options: object) -> dict[str, float]:
    model = open_model(folder, plain=PlainOptions(**options))  # type: ignore[arg-type]
    assert isinstance(model, CheckpointModel)
    list(model.load_layers())
    return model.relative_errors()


def test_errors_are_those_of_what_is_served(tmp_path: Path) -> None:
    weight = weights(n=200, k=1000)
    folder = write_plain(tmp_path, {"a.weight": weight, "b.weight": weight * 2})
    errors = errors_of(folder, treatment="rtn", group_size=64)
    layer = open_checkpoint(folder, plain=PlainOptions(group_size=64)).load("a")
    off = reference.dequantize(packing.pack(layer)) - weight
    assert errors["a"] == pytest.approx(float(off.norm() / weight.norm()), rel=1e-4)
    assert errors["b"] == pytest.approx(errors["a"], rel=1e-3)
    assert errors_of(folder, treatment="mse", group_size=64)["a"] < errors["a"]


def test_a_calibration_file_weighs_the_search(tmp_path: Path) -> None:
    weight = weights(n=64, k=128)
    folder = tmp_path / "model"
    folder.mkdir()
    write_plain(folder, {"a.weight": weight, "other.weight": weight.clone()})
    moments = torch.ones(128)
    moments[:64] = 1e4
    save_file({"a": moments}, tmp_path / "moments")
    errors = errors_of(folder, treatment="mse", group_size=-1, calibration=tmp_path / "moments")
    without = errors_of(folder, treatment="mse", group_size=-1)
    assert errors["other"] == without["other"]
    assert errors["a"] != without["a"]


@pytest.mark.parametrize(
    ("moments", "message"),
    [
        (torch.ones(64), r"a: is F32 \[64\]; expected F16 or BF16 or F32 \[128\]"),
        (torch.ones(128).int(), r"a: is I32 \[128\]"),
        (-torch.ones(128), "a: holds a number that is no mean square"),
        (torch.full((128,), torch.nan), "a: holds a number that is no mean square"),
    ],
)
def test_calibration_files_that_cannot_be_used(
    moments: torch.Tensor, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_plain(folder, {"a.weight": weights(k=128)})
    save_file({"a": moments}, tmp_path / "moments")
    with pytest.raises(CheckpointError, match=message):
        errors_of(folder, treatment="mse", calibration=tmp_path / "moments")
    with pytest.raises(CheckpointError, match="absent: does not exist"):
        errors_of(folder, treatment="mse", calibration=tmp_path / "absent")


def test_a_calibration_file_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_plain(folder, {"a.weight": weights(k=128)})
    save_file({"a.weight": torch.ones(128)}, tmp_path / "moments")
    with pytest.raises(CheckpointError, match="no tensor that is called like a module, such as a;"):
        errors_of(folder, treatment="mse", calibration=tmp_path / "moments")


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    weight = weights(n=100)
    weight[70, 3] = torch.inf
    folder = write_plain(tmp_path, {"a.weight": weight})
    for treatment in ("rtn", "keep"):
        with pytest.raises(CheckpointError, match=r"a\.weight: weight\[70, 3\] is inf; expected"):
            list(open_model(folder, plain=PlainOptions(treatment=treatment)).load_layers())


def test_what_is_no_linear_layer_is_named(tmp_path: Path) -> None:
    tensors = {
        "fc.weight": torch.ones(8, 8), "fc.bias": torch.ones(4), "norm.weight": torch.ones(8),
        "conv.weight": torch.ones(4, 4, 3), "embed_tokens.weight": torch.ones(8, 8),
        "int.weight": torch.ones(8, 8).to(torch.int8), "wte.weight": torch.ones(8, 8),
        "free": torch.ones(4, 4), "none.weight": torch.ones(0, 8),
    }  # fmt: skip
    checkpoint = open_checkpoint(write_plain(tmp_path, tensors))
    assert [spec.module for spec in checkpoint.layers] == ["fc"]
    assert not checkpoint.layers[0].has_bias  # four numbers for eight features
    reasons = dict(checkpoint.skipped)
    assert set(reasons) == set(tensors) - {"fc.weight"}
    for name, text in (
        ("fc.bias", "not part of the format"), ("norm.weight", "norm, bias"),
        ("conv.weight", "3 dimensions"), ("embed_tokens.weight", "embedding"),
        ("int.weight", "dtype I8"), ("wte.weight", "embedding"), ("free", "norm, bias or buffer"),
    ):  # fmt: skip
        assert text in reasons[name]


def test_transposed_layers_of_old_models_are_not_misread(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tensors = {"h.0.attn.c_attn.weight": torch.ones(8, 24), "lm_head.weight": torch.ones(32, 8)}
    checkpoint = open_checkpoint(write_plain(tmp_path, tensors))
    assert [spec.module for spec in checkpoint.layers] == ["lm_head"]
    assert "store it transposed" in dict(checkpoint.skipped)["h.0.attn.c_attn.weight"]


def test_tied_tensors_are_served_under_each_of_their_names(tmp_path: Path) -> None:
    """Libraries write a shared tensor once and note the other names in the metadata."""
    head = weights(n=32, k=64)
    save_file(
        {"model.embed_tokens.weight": head},
        tmp_path / "model.safetensors",
        metadata={"format": "pt", "lm_head.weight": "model.embed_tokens.weight"},
    )
    for treatment in ("keep", "rtn"):
        checkpoint = open_checkpoint(tmp_path, plain=PlainOptions(treatment=treatment))
        assert [spec.module for spec in checkpoint.layers] == ["lm_head"]
    kept = open_checkpoint(tmp_path, plain=PlainOptions(treatment="keep")).load("lm_head")
    assert torch.equal(kept.codes.T, head)


def test_a_separate_head_of_a_tied_model_is_taken_from_the_file(tmp_path: Path) -> None:
    """The configuration says tied, the file holds a head: tensors are the truth."""
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    write_plain(tmp_path, {"lm_head.weight": weights(k=64), "embed.weight": weights(k=64)})
    assert [spec.module for spec in open_checkpoint(tmp_path).layers] == ["lm_head"]


def test_options_reach_quantized_checkpoints_too() -> None:
    options = PlainOptions(treatment="mse", bits=8, group_size=32, symmetric=False)
    checkpoint = open_checkpoint(VECTORS / "ct-llmcompressor-w4a16-channel-sym", plain=options)
    head = next(spec for spec in checkpoint.layers if spec.module == "lm_head")
    assert (head.bits, head.group_size, head.symmetric) == (8, 32, False)
    assert (head.source.format, head.source.method) == ("plain", "mse")
