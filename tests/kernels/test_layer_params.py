"""What kernels are told of a layer besides where it lies."""

import pytest
import torch
from random_layers import random_layer

from qlinear_service.dtypes import DType
from qlinear_service.kernels import packing
from qlinear_service.kernels.layer_params import weights_fit


@pytest.mark.parametrize(
    ("bits", "largest", "fits"),
    [(4, 0.01, True), (4, 4094.0, True), (4, 4096.0, False), (8, 255.5, True), (8, 256.0, False)],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_weights_fit_where_no_code_can_leave_float16(
    bits: int, largest: float, fits: bool, sign: float
) -> None:
    logical = random_layer(n=70, k=256, bits=bits)
    logical.scales.fill_(0.001)
    logical.scales[1, 69] = sign * largest
    assert weights_fit(packing.pack(logical)) is fits


def test_bfloat16_scales_beyond_float16_do_not_fit() -> None:
    logical = random_layer(n=64, k=128, scale_dtype=DType.BF16)
    assert weights_fit(packing.pack(logical))
    logical.scales.fill_(torch.finfo(torch.bfloat16).max)
    assert not weights_fit(packing.pack(logical))
