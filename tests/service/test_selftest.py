"""The self-test passes right kernels on every kind of layer and catches plausible wrong ones."""

import pytest
import torch
from random_layers import random_layer

from qlinear_service.dtypes import DType
from qlinear_service.errors import SelfTestError
from qlinear_service.kernels import build
from qlinear_service.kernels.backends import CpuBody, CpuKernels, TorchKernels
from qlinear_service.kernels.packing import pack, unpack
from qlinear_service.layers import LogicalLayer, QuantizedLinear
from qlinear_service.selftest import run_self_test

KINDS = [
    {},
    {"bits": 8, "group_size": -1},
    {"symmetric": False, "bias": True},
    {"scale_dtype": DType.BF16, "group_size": 32},
    {"scale_dtype": DType.F32, "permuted": True},
]


def layer(number: int, **more: object) -> QuantizedLinear:
    return pack(random_layer(n=72, k=200, module=f"layer{number}", **more))  # type: ignore[arg-type]


def test_right_kernels_pass_and_each_kind_is_tested_once() -> None:
    layers = [layer(number, **kind) for number, kind in enumerate([*KINDS, *KINDS])]
    assert run_self_test(TorchKernels(), layers) == len(KINDS)
    assert run_self_test(TorchKernels(), []) == 0


class Wrong(TorchKernels):
    """Computes with another layer or spoils the answer."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        logical = unpack(layer)
        if self.fault == "zero point off by one":
            codes = logical.codes.clamp(min=1) - 1
            layer = pack(LogicalLayer(spec=layer.spec, codes=codes, scales=logical.scales))
        y = super().linear(layer, x, output_dtype)
        if self.fault == "rows swapped":
            y[[0, 1]] = y[[1, 0]]
        elif self.fault == "one column nan":
            y[3, 4] = float("nan")
        elif self.fault == "last column zero":
            y[:, -1] = 0
        elif self.fault == "a row too few":
            y = y[:-1]
        elif self.fault == "bad rounding" and output_dtype is DType.BF16:
            y = y + y.abs() * 2.0**-6
        return y


@pytest.mark.parametrize(
    "fault",
    [
        "zero point off by one",
        "rows swapped",
        "one column nan",
        "last column zero",
        "a row too few",
        "bad rounding",
    ],
)
def test_wrong_kernels_are_caught(fault: str) -> None:
    with pytest.raises(SelfTestError, match=r"'torch' .*'test/layer0' \(k200_n72_b4_g128"):
        run_self_test(Wrong(fault), [layer(0)])


def test_a_fault_beyond_the_first_slab_is_found() -> None:
    wide = pack(random_layer(n=1500, k=64, group_size=32, module="layer0"))

    class LastSlabWrong(TorchKernels):
        def linear(
            self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType
        ) -> torch.Tensor:
            y = super().linear(layer, x, output_dtype)
            y[2, 1400] += 1
            return y

    assert run_self_test(TorchKernels(), [wide]) == 1
    with pytest.raises(SelfTestError, match=r"y\[2, 1400\] is"):
        run_self_test(LastSlabWrong(), [wide])


def test_a_fault_of_many_rows_is_found_on_the_first_features() -> None:
    seen: list[tuple[int, int]] = []

    class ManyRowsWrong(TorchKernels):
        def path_rows(self, bits: int) -> tuple[int, ...]:
            return (13, 600)

        def linear(
            self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType
        ) -> torch.Tensor:
            seen.append((len(x), layer.spec.n))
            y = super().linear(layer, x, output_dtype)
            if len(x) >= 512:
                y[511, 7] += 1
            return y

    with pytest.raises(SelfTestError, match=r"y\[511, 7\] is"):
        run_self_test(ManyRowsWrong(), [layer(0)])
    assert seen == [*[(13, 72)] * 3, (600, 64)]


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        (CpuBody.PLAIN, (7, 8)),
        (CpuBody.AVX2, (13, 77, 512)),
        (CpuBody.AVX512, (13, 77)),
        (CpuBody.AVX512_BF16, (13, 77)),
    ],
)
def test_kernels_name_the_rows_that_take_all_their_paths(
    body: CpuBody, rows: tuple[int, ...]
) -> None:
    library = build.build_cpu_library(build.default_cache_dir())
    assert CpuKernels(library, threads=1, body=body).path_rows(4) == rows


def test_both_paths_of_real_kernels_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.build_cpu_library(build.default_cache_dir())
    kernels = CpuKernels(library, threads=1, body=CpuBody.PLAIN)
    monkeypatch.setattr(CpuKernels, "_multiply_slabs", lambda self, layer, params, x, y: y.fill_(3))
    with pytest.raises(SelfTestError, match="disagree"):
        run_self_test(kernels, [layer(0)])
