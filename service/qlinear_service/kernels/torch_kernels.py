"""The reference as a working path, for machines without a compiler: right, and slow.

What it answers is what any kernels do: `backends.Kernels`. Knows no library.
"""

import functools

import torch

from qlinear_service.dtypes import DType
from qlinear_service.kernels import reference, unquantized
from qlinear_service.layers import QuantizedLinear

__all__ = ["INVARIANT", "SAMPLE_ROWS", "TorchKernels"]

SAMPLE_ROWS = 13
"""8 + 4 + 1: every number of rows that a body of the CPU kernels computes together."""

INVARIANT = ", batch-invariant"
"""What the description of such kernels ends with."""


class TorchKernels:
    """Dequantizes each layer at each call.

    Args:
        instead: why there are no real kernels, where somebody might want them.
        batch_invariant: no bit of a row's result depends on the other rows.
    """

    name = "torch"
    description = "plain torch, which dequantizes each layer at each call"

    def __init__(self, instead: str = "", *, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant
        self.description += INVARIANT * batch_invariant
        if instead:
            self.description += f", instead of kernels: {instead}"

    def path_rows(self, bits: int) -> tuple[int, ...]:
        """Return row counts that together take every path of `linear` for codes of `bits`."""
        return (SAMPLE_ROWS,)

    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        """Return y [m, n] of `output_dtype` for x [m, k]."""
        multiply = functools.partial(unquantized.multiply, row_by_row=self._batch_invariant)
        return reference.linear(layer, x, output_dtype=output_dtype, multiply=multiply)

    def read(self, buffer: torch.Tensor, *, passes: int, threads: int) -> None:
        """Read `buffer`, contiguous int64, `passes` times as fast as torch can."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        for _ in range(passes):
            buffer.sum()
        torch.set_num_threads(before)
