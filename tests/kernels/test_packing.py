"""Packing loses nothing, puts every code where the layout says, and never changes unnoticed."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import random_layer

from qlinear_service.dtypes import DType
from qlinear_service.kernels import layout, packing, reference

GOLDEN = Path(__file__).parents[1] / "data" / "layout_golden.json"


@pytest.mark.parametrize("bits", layout.BITS)
def test_every_code_lies_where_the_layout_says(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (256, 128), dtype=torch.uint8)
    packed = packing.pack_codes(codes, bits).flatten().tolist()
    for k in range(256):
        for n in range(128):
            byte, shift = layout.code_place(n, k, 256, bits)
            assert packed[byte] >> shift & (2**bits - 1) == codes[k, n]


def test_every_scale_lies_where_the_layout_says() -> None:
    scales = torch.rand(5, 128)
    packed = packing.pack_columns(scales).flatten()
    for group in range(5):
        for n in range(128):
            assert packed[layout.scale_index(group, n, 5)] == scales[group, n]


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 200),
    k=st.integers(1, 400),
    bits=st.sampled_from(layout.BITS),
    group_size=st.sampled_from(layout.GROUP_SIZES),
    symmetric=st.booleans(),
    bias=st.booleans(),
    permuted=st.booleans(),
    scale_dtype=st.sampled_from(list(DType)),
    seed=st.integers(0, 2**31),
)
def test_unpack_is_the_exact_inverse_of_pack(seed: int, **form: object) -> None:
    layer = random_layer(seed=seed, **form)  # type: ignore[arg-type]
    packed = packing.pack(layer)
    assert packed.qweight.shape[0] % 4 == 0
    assert packed.qweight.shape[1] % 2 == 0
    again = packing.unpack(packed)
    for name in ("codes", "scales", "zeros", "bias", "k_permutation"):
        before, after = getattr(layer, name), getattr(again, name)
        assert (before is None) == (after is None), name
        assert before is None or (before.dtype == after.dtype and torch.equal(before, after)), name


@pytest.mark.parametrize("bits", layout.BITS)
@pytest.mark.parametrize("group_size", layout.GROUP_SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_padding_multiplies_to_exactly_zero(bits: int, group_size: int, symmetric: bool) -> None:
    layer = random_layer(n=70, k=200, bits=bits, group_size=group_size, symmetric=symmetric)
    packed = packing.pack(layer)
    spec = packed.spec
    codes = packing.unpack_codes(packed.qweight, bits).float()
    rows = spec.k_padded if group_size == -1 else group_size
    scales = packing.unpack_columns(packed.scales).float().repeat_interleave(rows, dim=0)
    zeros: torch.Tensor | float = float(1 << (bits - 1))
    if packed.zeros is not None:
        zeros = packing.unpack_columns(packed.zeros).float().repeat_interleave(rows, dim=0)
    weight = (codes - zeros) * scales
    assert weight.shape == (256, 128)
    assert not weight[200:].any()
    assert not weight[:, 70:].any()
    assert torch.equal(weight[:200, :70], reference.dequantize(layer).T)


def test_act_order_columns_return_to_their_places() -> None:
    layer = random_layer(n=8, k=64, permuted=True, group_size=32)
    weight = reference.dequantize(layer)
    assert layer.k_permutation is not None
    for i, feature in enumerate(layer.k_permutation.tolist()):
        scale = layer.scales[i // 32].float()
        assert torch.equal(weight[:, feature], (layer.codes[i].float() - 8) * scale)


@pytest.mark.parametrize("field", ["codes", "scales", "zeros", "bias"])
def test_tensors_that_contradict_the_spec_are_refused(field: str) -> None:
    good = random_layer(n=64, k=128, symmetric=False, bias=True)
    parts = {
        name: getattr(good, name) for name in ("codes", "scales", "zeros", "bias", "k_permutation")
    }
    parts[field] = parts[field][..., :-1]
    with pytest.raises(ValueError, match=rf"test/layer: {field} is .* expected"):
        packing.pack(type(good)(spec=good.spec, **parts))


def golden_digests() -> dict[str, str]:
    """Digests of layers made by a formula, so that they do not hang on a random generator."""
    digests = {}
    k, n = torch.arange(256)[:, None], torch.arange(128)[None, :]
    for bits in layout.BITS:
        codes = ((k * 7 + n * 13 + k * n) % 2**bits).to(torch.uint8)
        raw = packing.pack_codes(codes, bits).numpy().tobytes()
        digests[f"codes_{bits}_bits"] = hashlib.sha256(raw).hexdigest()
        digests[f"first_vectors_{bits}_bits"] = raw[:64].hex()
    scales = (torch.arange(4)[:, None] * 128 + n).to(torch.int16)
    raw = packing.pack_columns(scales).numpy().astype("<i2").tobytes()
    digests["scales"] = hashlib.sha256(raw).hexdigest()
    return digests


def test_the_layout_is_that_of_its_version() -> None:
    """A change here breaks every packed file: raise the version, then renew the golden file."""
    golden = json.loads(GOLDEN.read_text())
    assert golden == {"layout_version": layout.VERSION, **golden_digests()}
