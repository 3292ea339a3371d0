"""Compares the kernels with the reference on every distinct kind of layer before serving.

A kernel that was built wrongly, or for another machine, or reads a layout that the packer does
not write, must be found here and not by a client. Runs on the engine's thread.
"""

from collections.abc import Iterable

import torch

from qlinear_service.dtypes import DType
from qlinear_service.errors import SelfTestError
from qlinear_service.kernels import reference
from qlinear_service.kernels.backends import Kernels
from qlinear_service.kernels.torch_types import from_torch, to_torch
from qlinear_service.layers import LayerSpec, QuantizedLinear

__all__ = ["SLAB_FEATURES", "check_form", "compare_features", "kind_of", "run_self_test"]

FEW_FEATURES = 64
"""Output features of further row counts: all of a layer with 512 rows would take seconds."""

SLAB_FEATURES = 512
"""Output features compared at a time, so that float32 weights of a slab are all it takes."""

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
        kind = kind_of(layer.spec)
        if kind not in tested:
            tested.add(kind)
            _test_layer(kernels, layer)
    return len(tested)


def kind_of(spec: LayerSpec) -> tuple[object, ...]:
    """Return what layers have in common of which one is tested for all."""
    return (
        spec.shape,
        spec.symmetric,
        spec.has_bias,
        spec.scale_dtype,
        spec.has_k_permutation,
    )


def _test_layer(kernels: Kernels, layer: QuantizedLinear) -> None:
    """Test the whole layer with the first row count of the kernels, and a part with the others."""
    first, *others = kernels.path_rows(layer.spec.bits)
    _test_rows(kernels, layer, rows=first)
    part = layer.features(0, min(FEW_FEATURES, layer.spec.n))
    for rows in others:
        _test_rows(kernels, part, rows=rows)


def _test_rows(kernels: Kernels, layer: QuantizedLinear, *, rows: int) -> None:
    draw = torch.Generator().manual_seed(layer.spec.k)
    who = f"kernels {kernels.name!r}"
    for dtype in DType:
        x = torch.randn((rows, layer.spec.k), generator=draw).to(to_torch(dtype))
        y = kernels.linear(layer, x, dtype)
        check_form(who, layer, x, y)
        for begin in range(0, layer.spec.n, SLAB_FEATURES):
            end = min(begin + SLAB_FEATURES, layer.spec.n)
            compare_features(who, layer, x, y, begin=begin, end=end)


def check_form(who: str, layer: QuantizedLinear, x: torch.Tensor, y: torch.Tensor) -> None:
    """Raise SelfTestError unless y has the shape and dtype that belong to x."""
    expected = (len(x), layer.spec.n)
    if tuple(y.shape) != expected or y.dtype != x.dtype:
        raise SelfTestError(
            f"{who} on layer {layer.spec.name!r} ({layer.spec.shape}) "
            f"returned {y.dtype} {list(y.shape)}; expected {x.dtype} {list(expected)}"
        )


def compare_features(
    who: str,
    layer: QuantizedLinear,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    begin: int,
    end: int,
) -> None:
    """Compare output features `begin` to `end` of y with the reference, where they lie.

    Args:
        who: what computed, for the message.
        layer: on the device of x and y.
        x: activations.
        y: all of the result.
        begin: a multiple of 64.
        end: at most n.

    Raises:
        SelfTestError: y is further off than rounding explains.
    """
    spec, dtype = layer.spec, from_torch(x.dtype)
    slab = layer.features(begin, end)
    with x.device:  # what the reference makes is made there
        weight = reference.dequantize(slab)
    # float32 activations are rounded to the layer's compute dtype before anything else.
    compute = spec.compute_dtype if dtype is DType.F32 else dtype
    seen = x.to(to_torch(compute)).float()
    exact = seen @ weight.T
    if slab.bias is not None:
        exact += slab.bias[: end - begin].float()
    norm = (seen.square() @ weight.square().T).sqrt()
    tolerance = norm * (SIGMAS * EPSILON[compute] + spec.k * EPSILON[DType.F32])
    tolerance += exact.abs() * 2 * EPSILON[dtype] + torch.finfo(x.dtype).smallest_normal
    actual, rounded = y[:, begin:end], exact.to(x.dtype)
    same = (actual == rounded) | (actual.isnan() & rounded.isnan())
    wrong = ~same & ~((actual.float() - exact).abs() <= tolerance)
    if wrong.any():
        row, column = (int(index) for index in wrong.nonzero()[0])
        raise SelfTestError(
            f"{who} disagree with the reference on layer {spec.name!r} "
            f"({spec.shape}, {dtype.text}): y[{row}, {begin + column}] is "
            f"{float(actual[row, column]):g}, expected {float(exact[row, column]):g} within "
            f"{float(tolerance[row, column]):g}; {int(wrong.sum())} of {wrong.numel()} are off"
        )
