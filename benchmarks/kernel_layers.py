"""Random layers in the runtime layout on the GPU, and the comparison of results with float64.

Codes are random bytes, since every byte is a valid code: nothing has to be packed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from kernel_figures import ERROR_LIMITS, WORST_FACTOR, Cell, Shape, Variant, weight_bytes
from kernel_gpu import Call, Gpu

from qlinear_service.kernels import layout, packing
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.torch_types import to_torch

CHECKED_BLOCKS = 8
"""Blocks of 16 output features whose results are compared with float64."""


@dataclass(frozen=True)
class Prepared:
    """What a contestant is ready to run in one cell."""

    calls: list[Call]
    """One for each copy of the weight."""
    error: float | None
    """Mean error over mean result; None: not checked."""
    wrong: str
    """Why its result cannot be accepted; empty if it can."""
    detail: dict[str, Any]
    """What else is worth keeping, e.g. its plan."""


@dataclass(frozen=True)
class Copy:
    """One copy of a random layer, in the runtime layout."""

    shape: Shape
    variant: Variant
    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def params(self, x: torch.Tensor, y: torch.Tensor) -> LinearParams:
        """Return what the library must know of y = x W^T."""
        dtype = self.variant.dtype
        return LinearParams(
            x=x.data_ptr(),
            qweight=self.qweight.data_ptr(),
            scales=self.scales.data_ptr(),
            zeros=None if self.zeros is None else self.zeros.data_ptr(),
            y=y.data_ptr(),
            m=x.shape[0],
            n=self.shape.n,
            k=self.shape.k,
            x_row_stride=x.stride(0),
            y_row_stride=y.stride(0),
            group_size=self.variant.group_size,
            bits=self.variant.bits,
            weights_fit=1,
            x_dtype=dtype,
            compute_dtype=dtype,
            scale_dtype=dtype,
            bias_dtype=dtype,
            y_dtype=dtype,
            threads=1,
        )

    def columns(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the weights of some blocks of 16 output features, float64 [k, 16 * blocks]."""
        codes = packing.unpack_codes(self.qweight[blocks], self.variant.bits).double()
        per_group = codes.shape[0] // self.scales.shape[1]
        scales = packing.unpack_columns(self.scales[blocks]).double()
        zeros: torch.Tensor | float = float(1 << (self.variant.bits - 1))
        if self.zeros is not None:
            zeros = packing.unpack_columns(self.zeros[blocks]).double()
            zeros = zeros.repeat_interleave(per_group, dim=0)
        return (codes - zeros) * scales.repeat_interleave(per_group, dim=0)


def random_copies(gpu: Gpu, shape: Shape, variant: Variant, count: int) -> list[Copy]:
    """Return distinct random layers: codes, scales and zero points all of their own."""
    sizes = weight_bytes(shape, variant)
    blocks = shape.n // layout.TILE_N
    groups = layout.group_count(shape.k, variant.group_size)
    tiles = (blocks, shape.k // layout.TILE_K, layout.tile_bytes(variant.bits))
    columns = (blocks, groups, layout.TILE_N)
    dtype = to_torch(variant.dtype)
    codes = gpu.copies("bits", sizes.codes, count)
    scales = gpu.copies(variant.dtype.text, sizes.scales, count)
    zeros: list[torch.Tensor] | None = None
    if variant.has_zeros:
        zeros = gpu.copies(f"zeros{variant.bits}", sizes.zeros, count)
    return [
        Copy(
            shape=shape,
            variant=variant,
            qweight=codes[i].view(tiles),
            scales=scales[i].view(dtype).view(columns),
            zeros=None if zeros is None else zeros[i].view(columns),
        )
        for i in range(count)
    ]


def checked(
    cell: Cell, x: torch.Tensor, y: torch.Tensor, copy: Copy, call: Call
) -> tuple[float, str]:
    """Run a call and compare a random sample of its columns with float64."""
    total = cell.shape.n // layout.TILE_N
    blocks = torch.randperm(total, device=x.device)[:CHECKED_BLOCKS].sort().values
    places = (
        blocks[:, None] * layout.TILE_N + torch.arange(layout.TILE_N, device=x.device)
    ).ravel()
    y.fill_(float("nan"))  # so that what is not written shows
    call()
    return compare(cell, y, places, x.double() @ copy.columns(blocks))


def compare(
    cell: Cell, y: torch.Tensor, places: torch.Tensor, expected: torch.Tensor
) -> tuple[float, str]:
    """Return the mean error over the mean result, and why y cannot be accepted, if so.

    Args:
        cell: says how exact the result must be.
        y: all results; NaN where none was written.
        places: the columns that are compared.
        expected: their true values, float64 [m, columns].
    """
    if not bool(torch.isfinite(y).all()):
        missing = int((~torch.isfinite(y)).sum())
        return float("inf"), f"{missing} of {y.numel()} results are not finite or not written"
    size = expected.abs().mean()
    off = (y[:, places].double() - expected).abs() / size
    mean, worst, limit = float(off.mean()), float(off.max()), ERROR_LIMITS[cell.variant.dtype]
    if not mean < limit:
        return mean, f"mean error {mean:.2e} of the mean result; less than {limit:g} is right"
    if not worst < WORST_FACTOR * limit:
        return (
            mean,
            f"one result is off by {worst:.2e} of the mean; {WORST_FACTOR * limit:g} is right",
        )
    return mean, ""
