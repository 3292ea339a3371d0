"""A row's bits whatever its company: every way in which the CPU computes batch-invariantly.

`tests/gpu/test_batches.py` does it on a GPU, `tests/e2e/test_batch_invariance.py` with a server.
"""

import pytest
import torch
from random_layers import random_layer, unquantized_layer

from qlinear_service.dtypes import DType
from qlinear_service.kernels import build, packing
from qlinear_service.kernels.backends import CpuBody, CpuKernels, Kernels, TorchKernels
from qlinear_service.layers import QuantizedLinear

LIBRARY = build.build_cpu_library(build.default_cache_dir())
QUANTIZED = packing.pack(random_layer(n=100, k=1000, bias=True, permuted=True))
UNQUANTIZED = packing.pack(unquantized_layer(n=100, k=1000, bias=True))
COMPANIES = (1, 2, 7, 8, 9, 64, 511, 512, 600)


def kernels_of(way: str, *, batch_invariant: bool) -> Kernels:
    if way == "torch":
        return TorchKernels(batch_invariant=batch_invariant)
    body = CpuBody.BEST if way == "best" else CpuBody[way]
    return CpuKernels(LIBRARY, threads=2, body=body, batch_invariant=batch_invariant)


def companies_that_change_a_row(kernels: Kernels, layer: QuantizedLinear) -> list[int]:
    """Return the batch sizes in which any row has other bits than alone."""
    x = torch.randn(max(COMPANIES), layer.spec.k, generator=torch.Generator().manual_seed(2))
    changed = []
    for dtype in (torch.float16, torch.float32):
        rows = x.to(dtype)
        alone = torch.cat([kernels.linear(layer, row[None], DType.F32) for row in rows])
        for m in COMPANIES:
            if not torch.equal(kernels.linear(layer, rows[-m:], DType.F32), alone[-m:]):
                changed.append(m)
    return changed


@pytest.mark.parametrize("way", ["PLAIN", "AVX2", "AVX512", "AVX512_BF16", "best", "torch"])
def test_quantized_rows_have_the_same_bits_in_any_company(way: str) -> None:
    kernels = kernels_of(way, batch_invariant=True)
    try:
        assert not companies_that_change_a_row(kernels, QUANTIZED)
    except RuntimeError as error:
        if "cannot run that body" not in str(error):
            raise
        pytest.skip(f"this processor has no {way}")


@pytest.mark.parametrize("way", ["best", "torch"])
def test_rows_of_unquantized_layers_have_the_same_bits_in_any_company(way: str) -> None:
    assert not companies_that_change_a_row(kernels_of(way, batch_invariant=True), UNQUANTIZED)


@pytest.mark.parametrize(
    ("way", "layer"),
    [("PLAIN", QUANTIZED), ("torch", QUANTIZED), ("best", UNQUANTIZED)],
    ids=["slabs", "torch", "unquantized"],
)
def test_without_the_mode_company_does_change_bits(way: str, layer: QuantizedLinear) -> None:
    """Else nothing would be shown above."""
    assert companies_that_change_a_row(kernels_of(way, batch_invariant=False), layer)


def test_both_kinds_of_kernels_say_that_they_are_batch_invariant() -> None:
    for way in ("best", "torch"):
        assert "batch-invariant" in kernels_of(way, batch_invariant=True).description
        assert "batch-invariant" not in kernels_of(way, batch_invariant=False).description
