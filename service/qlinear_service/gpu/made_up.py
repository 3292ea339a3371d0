"""Layers of random bytes, made on the device in no time: any bytes are valid codes.

For measures and self-tests; sizes are multiples of what layers are padded to.
"""

import torch

from qlinear_service.dtypes import DType
from qlinear_service.kernels import layout
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerSpec, QuantizedLinear

__all__ = ["made_up_layer"]


def made_up_layer(
    *,
    n: int,
    k: int,
    bits: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: DType,
    device: torch.device,
    model: str = "made-up",
    module: str = "layer",
) -> QuantizedLinear:
    """Return a layer in the runtime layout.

    Args:
        n: output features, a multiple of 64.
        k: input features, a multiple of 128.
        bits: 4 or 8.
        group_size: 32, 64, 128 or -1.
        symmetric: whether there are no zero points.
        scale_dtype: of its scales.
        device: where it lies.
        model: its name.
        module: its name.
    """
    spec = LayerSpec(
        model=model,
        module=module,
        n=n,
        k=k,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        has_bias=False,
        scale_dtype=scale_dtype,
    )
    if (spec.n_padded, spec.k_padded) != (n, k):
        raise ValueError(f"n is {n} and k {k}; expected multiples of 64 and 128")
    draw = torch.Generator(device).manual_seed(n + k + bits)
    columns = (n // layout.TILE_N, spec.groups, layout.TILE_N)
    tiles = (n // layout.TILE_N, k // layout.TILE_K, layout.tile_bytes(bits))
    scales = torch.randn(columns, generator=draw, device=device) * 2.0**-bits / k**0.5
    return QuantizedLinear(
        spec=spec,
        qweight=_bytes(tiles, 256, draw),
        scales=scales.to(to_torch(scale_dtype)),
        zeros=None if symmetric else _bytes(columns, 2**bits, draw),
    )


def _bytes(shape: tuple[int, ...], below: int, draw: torch.Generator) -> torch.Tensor:
    return torch.randint(0, below, shape, dtype=torch.uint8, generator=draw, device=draw.device)
