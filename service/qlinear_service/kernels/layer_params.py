"""What both libraries must know of a layer, as their C interface takes it."""

from qlinear_service.dtypes import DType
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.torch_types import from_torch
from qlinear_service.layers import QuantizedLinear

__all__ = ["layer_params", "weights_fit"]

LARGEST_F16 = 65504.0


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


def weights_fit(layer: QuantizedLinear) -> bool:
    """Return whether float16 holds all weights of `layer`, whatever its codes and zero points.

    Reads all scales, so a layer is asked once. Without it kernels keep to float32 scales.
    """
    if layer.scales.numel() == 0:
        return False
    return layer.scales.abs().amax().item() * 2.0**layer.spec.bits <= LARGEST_F16
