"""The truth: dequantize with torch and multiply in float32 or float64.

Slow and obvious on purpose. It answers requests only where no kernel library can be built, and
is what every kernel is compared with in tests and at start.
"""

from collections.abc import Callable

import torch

from qlinear_service.dtypes import DType
from qlinear_service.kernels import packing
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LogicalLayer, QuantizedLinear

__all__ = ["dequantize", "linear"]


def dequantize(layer: LogicalLayer | QuantizedLinear) -> torch.Tensor:
    """Return the weight, float32 [n, k], columns in the model's own order.

    Exact for float16 and bfloat16 scales: 11 significant bits times at most 9 fit into 24.
    """
    if not layer.spec.quantized:
        stored = layer.qweight if isinstance(layer, QuantizedLinear) else layer.codes.T
        return stored[: layer.spec.n].float().contiguous()
    logical = packing.unpack(layer) if isinstance(layer, QuantizedLinear) else layer
    spec = logical.spec
    group_of_k = torch.zeros(spec.k, dtype=torch.long)
    if spec.group_size != -1:
        group_of_k = torch.arange(spec.k) // spec.group_size
    zeros: torch.Tensor | float = float(1 << (spec.bits - 1))
    if logical.zeros is not None:
        zeros = logical.zeros.float()[group_of_k]
    weight = (logical.codes.float() - zeros) * logical.scales.float()[group_of_k]
    if logical.k_permutation is not None:
        unsorted = torch.empty_like(weight)
        unsorted[logical.k_permutation.long()] = weight
        weight = unsorted
    return weight.T.contiguous()


def linear(
    layer: LogicalLayer | QuantizedLinear,
    x: torch.Tensor,
    *,
    output_dtype: DType | None = None,
    precision: torch.dtype = torch.float32,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda x, w: x @ w.T,
) -> torch.Tensor:
    """Return y = x W^T + bias.

    Args:
        layer: the layer in either form.
        x: [m, k], float16, bfloat16 or float32; float32 is rounded to the layer's compute dtype.
        output_dtype: dtype of y; None is that of x.
        precision: in which the product is formed; float64 for a yardstick of float32 kernels.
        multiply: forms it, of x [m, k] and the weight [n, k].

    Returns:
        [m, n], rounded once.
    """
    spec = layer.spec
    if x.dtype == torch.float32:
        x = x.to(to_torch(spec.compute_dtype)).to(torch.float32)
        result_dtype = torch.float32
    else:
        result_dtype = x.dtype
    if output_dtype is not None:
        result_dtype = to_torch(output_dtype)
    y = multiply(x.to(precision), dequantize(layer).to(precision))
    if layer.bias is not None:
        y += layer.bias[: spec.n].to(precision)
    return y.to(result_dtype)
