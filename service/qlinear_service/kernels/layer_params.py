"""What both libraries must know of a layer, as their C interface takes it."""

from qlinear_service.dtypes import DType
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.torch_types import from_torch
from qlinear_service.layers import QuantizedLinear

__all__ = ["layer_params"]


def layer_params(layer: QuantizedLinear, *, threads: int = 1) -> LinearParams:
    """Return the params of `layer`, valid for no rows; activations are still to be filled in.

    The tensors of the layer must outlive what is returned, which holds their addresses.
    """
    spec = layer.spec
    return LinearParams(
        qweight=layer.qweight.data_ptr(),
        scales=layer.scales.data_ptr(),
        zeros=None if layer.zeros is None else layer.zeros.data_ptr(),
        bias=None if layer.bias is None else layer.bias.data_ptr(),
        n=spec.n,
        k=spec.k,
        group_size=spec.group_size,
        bits=spec.bits,
        x_dtype=spec.compute_dtype,
        y_dtype=spec.compute_dtype,
        compute_dtype=spec.compute_dtype,
        scale_dtype=spec.scale_dtype,
        bias_dtype=DType.F32 if layer.bias is None else from_torch(layer.bias.dtype),
        threads=threads,
    )
