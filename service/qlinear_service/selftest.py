"""Compares the kernels with the reference on every distinct kind of layer before serving.

A kernel that was built wrongly, or for another machine, or reads a layout that the packer does
not write, must be found here and not by a client. Runs on the engine's thread.
"""

from collections.abc import Iterable

import torch

from qlinear_service.dtypes import DType
from qlinear_service.errors import SelfTestError
from qlinear_service.kernels import reference
from qlinear_service.kernels.library import Kernels
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerSpec, QuantizedLinear

__all__ = ["run_self_test"]

ROWS = 5
"""Odd, and more than one: a kernel that mixes rows up, or handles them in pairs, is found."""

SIGMAS = 8
"""Rounding errors of single products are independent, so their sum grows like the root of their
squares; eight standard deviations do not happen by chance in any number of outputs we test."""

EPSILON = {DType.F16: 2.0**-11, DType.BF16: 2.0**-8, DType.F32: 2.0**-24}
"""Largest relative error of one rounding to nearest."""


def run_self_test(kernels: Kernels, layers: Iterable[QuantizedLinear]) -> int:
    """Compare `kernels` with the reference; return how many kinds of layers were tested.

    Raises:
        SelfTestError: an answer is further from the reference than rounding explains.
    """
    tested: set[tuple[object, ...]] = set()
    for layer in layers:
        kind = _kind(layer.spec)
        if kind not in tested:
            tested.add(kind)
            _test_layer(kernels, layer)
    return len(tested)


def _kind(spec: LayerSpec) -> tuple[object, ...]:
    return (
        spec.shape,
        spec.symmetric,
        spec.has_bias,
        spec.scale_dtype,
        spec.has_k_permutation,
    )


def _test_layer(kernels: Kernels, layer: QuantizedLinear) -> None:
    weight = reference.dequantize(layer)
    draw = torch.Generator().manual_seed(layer.spec.k)
    for dtype in DType:
        x = torch.randn((ROWS, layer.spec.k), generator=draw).to(to_torch(dtype))
        # One row of one sign: a wrong zero point adds up instead of cancelling out.
        x[0] = x[0].abs()
        _compare(kernels, layer, x, weight)


def _compare(
    kernels: Kernels, layer: QuantizedLinear, x: torch.Tensor, weight: torch.Tensor
) -> None:
    spec = layer.spec
    dtype = next(dtype for dtype in DType if to_torch(dtype) == x.dtype)
    # float32 activations are rounded to the layer's compute dtype before anything else.
    compute = spec.compute_dtype if dtype is DType.F32 else dtype
    seen = x.to(to_torch(compute)).float()
    expected = seen @ weight.T
    if layer.bias is not None:
        expected += layer.bias[: spec.n].float()
    norm = (seen.square() @ weight.square().T).sqrt()
    tolerance = norm * (SIGMAS * EPSILON[compute] + spec.k * EPSILON[DType.F32])
    tolerance += expected.abs() * 2 * EPSILON[dtype] + torch.finfo(x.dtype).smallest_normal
    rounded = expected.to(x.dtype)
    actual = kernels.linear(layer, x, dtype)
    if actual.shape != rounded.shape or actual.dtype != rounded.dtype:
        raise SelfTestError(
            f"kernels {kernels.name!r} on layer {spec.name!r} ({spec.shape}) returned "
            f"{actual.dtype} {list(actual.shape)}; expected {rounded.dtype} {list(rounded.shape)}"
        )
    same = (actual == rounded) | (actual.isnan() & rounded.isnan())
    error = (actual.float() - expected).abs()
    wrong = ~same & ~(error <= tolerance)
    if wrong.any():
        row, column = (int(index) for index in wrong.nonzero()[0])
        raise SelfTestError(
            f"kernels {kernels.name!r} disagree with the reference on layer {spec.name!r} "
            f"({spec.shape}, {dtype.text}): y[{row}, {column}] is {float(actual[row, column]):g}, "
            f"expected {float(expected[row, column]):g} within "
            f"{float(tolerance[row, column]):g}; {int(wrong.sum())} of {wrong.numel()} are off"
        )
