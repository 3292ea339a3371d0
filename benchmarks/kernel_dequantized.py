"""The other way to multiply many rows, as a contestant: dequantized weights, then cuBLAS.

What a tier for large M would be made of: our dequantization (ql_cuda_dequantize) of some output
features at a time, so that their weights are still in the L2 cache when torch.mm reads them, or of
all at once. Nothing of a server runs this way: it is here to be measured.
"""

import torch
from kernel_figures import MIB, Cell, copies_for, weight_bytes
from kernel_gpu import Call, Gpu
from kernel_layers import Copy, Prepared, checked, random_copies
from kernel_ours import Library

from qlinear_service.kernels import layout
from qlinear_service.kernels.torch_types import to_torch

LEAST_ROWS = 1024
"""Below, writing and reading 16-bit weights cannot pay."""
SLABS_MIB = (16, 32, None)
"""Of dequantized weights in the L2 cache beside x and y; None: the whole layer at once."""
FEATURES_STEP = 256
"""Widths of slabs are multiples of it: whole tiles of the dense product."""


class Dequantized:
    """Slabs of a layer, dequantized and multiplied one after the other."""

    def __init__(self, gpu: Gpu, library: Library, slab_mib: int | None) -> None:
        self.name = f"dequantized {'whole' if slab_mib is None else f'{slab_mib} MiB'}"
        self._gpu, self._library, self._slab_mib = gpu, library, slab_mib
        self._scratch = torch.empty(0, dtype=torch.uint8, device=gpu.device)

    def slabs(self, cell: Cell) -> list[tuple[int, int]]:
        """Return the first feature and the number of features of each slab."""
        n, width = cell.shape.n, cell.shape.n
        if self._slab_mib is not None:
            fits = self._slab_mib * MIB // (cell.shape.k * cell.variant.dtype.itemsize)
            width = max(fits // FEATURES_STEP * FEATURES_STEP, layout.TILE_N)
        return [(begin, min(width, n - begin)) for begin in range(0, n, width)]

    def prepare(self, cell: Cell, x: torch.Tensor, y: torch.Tensor) -> Prepared:
        """Return its calls in a cell, after checking the first and the last of them."""
        slabs, dtype = self.slabs(cell), to_torch(cell.variant.dtype)
        count = copies_for(weight_bytes(cell.shape, cell.variant).total)
        size = slabs[0][1] * cell.shape.k * dtype.itemsize
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self._gpu.device)
        weights = self._scratch[:size].view(dtype).view(slabs[0][1], cell.shape.k)
        copies = random_copies(self._gpu, cell.shape, cell.variant, count)
        calls = [self._product(copy, slabs, weights, x, y) for copy in copies]
        found = [checked(cell, x, y, copies[at], calls[at]) for at in (0, -1)]
        detail = {"slabs": len(slabs), "features": slabs[0][1]}
        error, wrong = max(error for error, _ in found), max(wrong for _, wrong in found)
        return Prepared(calls, error, wrong, detail)

    def _product(
        self,
        copy: Copy,
        slabs: list[tuple[int, int]],
        weights: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> Call:
        params, dtype = copy.params(x, y), copy.variant.dtype
        steps = [
            (
                self._library.dequantize(params, begin, width, dtype, weights),
                weights[:width].T,
                y[:, begin : begin + width],
            )
            for begin, width in slabs
        ]

        def call() -> None:
            for dequantize, slab, out in steps:
                dequantize()
                torch.mm(x, slab, out=out)

        return call
