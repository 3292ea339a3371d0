"""Random layers with every feature of the format, for the tests of this folder and others."""

import torch

from qlinear_service.dtypes import DType
from qlinear_service.kernels.packing import stored_groups
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import UNQUANTIZED_BITS, LayerSpec, LogicalLayer


def random_layer(
    *,
    n: int,
    k: int,
    bits: int = 4,
    group_size: int = 128,
    symmetric: bool = True,
    bias: bool = False,
    scale_dtype: DType = DType.F16,
    permuted: bool = False,
    model: str = "test",
    module: str = "layer",
    seed: int = 0,
) -> LogicalLayer:
    """Return a layer whose every tensor comes from `seed`."""
    draw = torch.Generator().manual_seed(seed)
    spec = LayerSpec(
        model=model,
        module=module,
        n=n,
        k=k,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        has_bias=bias,
        scale_dtype=scale_dtype,
        has_k_permutation=permuted,
    )
    columns = (stored_groups(spec), n)
    codes = torch.randint(0, 2**bits, (k, n), dtype=torch.uint8, generator=draw)
    # Negative scales are legal: symmetric AutoRound files hold them.
    scales = (torch.randn(columns, generator=draw) * 2.0**-bits).to(to_torch(scale_dtype))
    zeros = torch.randint(0, 2**bits, columns, dtype=torch.uint8, generator=draw)
    return LogicalLayer(
        spec=spec,
        codes=codes,
        scales=scales,
        zeros=None if symmetric else zeros,
        bias=torch.randn(n, generator=draw).half() if bias else None,
        k_permutation=torch.randperm(k, generator=draw).int() if permuted else None,
    )


def unquantized_layer(
    *, n: int, k: int, bias: bool = False, model: str = "test", module: str = "layer", seed: int = 0
) -> LogicalLayer:
    """Return a float16 layer that stays as it is; torch multiplies with it."""
    draw = torch.Generator().manual_seed(seed)
    spec = LayerSpec(
        model=model,
        module=module,
        n=n,
        k=k,
        bits=UNQUANTIZED_BITS,
        group_size=-1,
        symmetric=True,
        has_bias=bias,
        scale_dtype=DType.F16,
    )
    return LogicalLayer(
        spec=spec,
        codes=torch.randn((k, n), generator=draw).half(),
        scales=torch.empty(0).half(),
        zeros=None,
        bias=torch.randn(n, generator=draw).half() if bias else None,
        k_permutation=None,
    )
