"""Multiplies with a layer that is not quantized: through torch, on whatever device it lies.

No kernel of ours reads such weights. Slabs of them are widened to float32, so that every dtype is
exact and sums are float32, as the kernels' are.
"""

import torch

from qlinear_service.dtypes import DType
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import QuantizedLinear

__all__ = ["fill", "linear", "multiply"]

SLAB_FEATURES = {"cpu": 256, "cuda": 8192}
"""Output features widened at a time: on the CPU a slab should stay in its cache, on a GPU it
should fill the device; either way it is small beside the layer."""


def linear(
    layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType, *, row_by_row: bool = False
) -> torch.Tensor:
    """Return y [m, n] of `output_dtype` for x [m, k], on the device of both; see `fill`."""
    y = torch.empty((x.shape[0], layer.spec.n), dtype=to_torch(output_dtype), device=x.device)
    fill(layer, x, y, row_by_row=row_by_row)
    return y


def fill(
    layer: QuantizedLinear, x: torch.Tensor, y: torch.Tensor, *, row_by_row: bool = False
) -> None:
    """Write x [m, k] times the weight, plus the bias, into y [m, n], rounded once to its dtype.

    float32 activations are rounded to the layer's compute dtype first, as for every layer. With
    `row_by_row` the bits of a row's result do not depend on the other rows.
    """
    spec = layer.spec
    if x.dtype == torch.float32:
        x = x.to(to_torch(spec.compute_dtype))
    wide = x.float()
    step = SLAB_FEATURES[x.device.type]
    for begin in range(0, spec.n, step):
        end = min(begin + step, spec.n)
        product = multiply(wide, layer.qweight[begin:end].float(), row_by_row=row_by_row)
        if layer.bias is not None:
            product += layer.bias[begin:end].float()
        y[:, begin:end] = product


def multiply(x: torch.Tensor, weight: torch.Tensor, *, row_by_row: bool) -> torch.Tensor:
    """Return x [m, k] times weight [n, k], both float32, as [m, n].

    Libraries choose the order of a sum by m, and by how memory is aligned; with `row_by_row` each
    row is a product of its own, of a copy that is aligned as every other.
    """
    if not row_by_row:
        return x @ weight.T
    y = x.new_empty((x.shape[0], weight.shape[0]))
    for row in range(x.shape[0]):
        y[row] = x[row : row + 1].clone() @ weight.T
    return y
