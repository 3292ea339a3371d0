"""Both kernels beside float64 and beside each other, for layers of any origin."""

import torch
from closeness import bound_of
from gpu.loading import RecordingKernels

from qlinear_service.dtypes import DType
from qlinear_service.kernels import packing, reference
from qlinear_service.kernels.backends import CpuKernels
from qlinear_service.layers import LogicalLayer

CUT_SUMS = 3
"""Tensor cores cut where float32 additions round to nearest: at most 17 addends lose a whole unit
for each 16 products, where the bound of rounded sums counts half a unit for each product."""


def assert_alike(
    kernels: RecordingKernels, cpu: CpuKernels, layer: LogicalLayer, x: torch.Tensor
) -> None:
    """Compare both kernels with float64 and with each other."""
    packed = packing.pack(layer)
    on_gpu = kernels.to_device(packed)
    exact = reference.linear(layer, x, output_dtype=DType.F32, precision=torch.float64).double()
    for dtype in DType:
        bound = bound_of(layer, x, exact, dtype)
        ours = kernels.linear(on_gpu, x.to(kernels.device), dtype).cpu().double()
        theirs = cpu.linear(packed, x, dtype).double()
        assert ((ours - exact).abs() <= CUT_SUMS * bound).all(), layer.spec.shape
        assert ((ours - theirs).abs() <= (CUT_SUMS + 1) * bound).all(), layer.spec.shape
