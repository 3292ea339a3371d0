"""How close a kernel's answer must be to the exact one, for all tests that ask."""

import pytest
import torch

from qlinear_service.dtypes import DType
from qlinear_service.kernels import packing, reference
from qlinear_service.kernels.backends import CpuBody, CpuKernels, Kernels
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LogicalLayer, QuantizedLinear


def kernels_are(kernels: Kernels, body: CpuBody) -> bool:
    return isinstance(kernels, CpuKernels) and kernels.body is body


def bound_of(
    layer: LogicalLayer | QuantizedLinear, x: torch.Tensor, exact: torch.Tensor, dtype: DType
) -> torch.Tensor:
    """Return how far from `exact` (float64) each element of y may be; from k and dtypes alone.

    Summing k products in float32 in any order errs by at most k 2^-24 sum |x w| (Higham, Accuracy
    and Stability of Numerical Algorithms, 4.2); one more such term for the bias; then the result is
    rounded once, by half a unit of the output dtype in the last place.
    """
    total = x.double().abs() @ reference.dequantize(layer).double().abs().T
    if layer.bias is not None:
        total += layer.bias[: layer.spec.n].double().abs()
    half_unit = {DType.F16: 2**-11, DType.BF16: 2**-8, DType.F32: 2**-24}[dtype]
    # 2^-24 once more for an `exact` that was rounded to float32; 2^-25: subnormal float16 results.
    return (layer.spec.k + 2) * 2**-24 * total + (half_unit + 2**-24) * exact.abs() + 2**-25


def assert_close(kernels: Kernels, layer: LogicalLayer, x: torch.Tensor, dtype: DType) -> None:
    """Compare every element of y with float64."""
    if kernels_are(kernels, CpuBody.AVX512_BF16) and layer.spec.bits != 4:
        pytest.skip("this body is for 4 bits")
    y = kernels.linear(packing.pack(layer), x, dtype)
    assert y.dtype == to_torch(dtype)
    assert y.shape == (x.shape[0], layer.spec.n)
    exact = reference.linear(layer, x, output_dtype=DType.F32, precision=torch.float64).double()
    errors = (y.double() - exact).abs() / bound_of(layer, x, exact, dtype)
    worst = errors.max().item() if y.numel() else 0.0
    assert worst <= 1.0, f"{layer.spec.shape}: {worst:.2f} times the bound"
