"""Small made-up layers with every feature of the format: what a self-test without a model takes."""

import itertools
from collections.abc import Iterator

import torch

from qlinear_service.dtypes import DType
from qlinear_service.kernels import layout
from qlinear_service.kernels.packing import pack, stored_groups
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerSpec, LogicalLayer, QuantizedLinear

__all__ = ["sample_layers"]

N, K = 200, 456
"""Neither is a multiple of anything that layers are padded to."""

GROUP_SIZES = (-1, 32, 64, 128)


def sample_layers() -> Iterator[QuantizedLinear]:
    """Yield a layer of each bits, group size and symmetry; the other features take turns."""
    kinds = itertools.product(layout.BITS, GROUP_SIZES, (True, False))
    for number, (bits, group_size, symmetric) in enumerate(kinds):
        spec = LayerSpec(
            model="sample",
            module=f"layer{number}",
            n=N,
            k=K,
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            has_bias=number % 2 == 1,
            scale_dtype=list(DType)[number % len(DType)],
            has_k_permutation=number % 4 == 2,
        )
        yield pack(_drawn(spec, seed=number))


def _drawn(spec: LayerSpec, *, seed: int) -> LogicalLayer:
    draw = torch.Generator().manual_seed(seed)
    columns, codes = (stored_groups(spec), spec.n), 2**spec.bits
    zeros = torch.randint(0, codes, columns, dtype=torch.uint8, generator=draw)
    scales = torch.randn(columns, generator=draw) / codes
    return LogicalLayer(
        spec=spec,
        codes=torch.randint(0, codes, (spec.k, spec.n), dtype=torch.uint8, generator=draw),
        scales=scales.to(to_torch(spec.scale_dtype)),
        zeros=None if spec.symmetric else zeros,
        bias=torch.randn(spec.n, generator=draw).half() if spec.has_bias else None,
        k_permutation=(
            torch.randperm(spec.k, generator=draw).int() if spec.has_k_permutation else None
        ),
    )
