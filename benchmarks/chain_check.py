"""Whether a chain of layers is right: the same bits every time, each layer as a single call has it.

A chain in one launch adds up in another order than single calls: its results are those of single
calls within rounding, and the next layer's differ by more, as they read others. So each layer is
compared with a single call on what the chain itself gave it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kernel_gpu import Call
from kernel_ours import Library

from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda_abi import CudaFlag

__all__ = ["REPETITIONS", "ROUNDING", "Checked", "check"]

REPETITIONS = 20
ROUNDING = 2.0**-10
"""Of a result and the root mean square of its row: twice half a unit of float16, and as much of the
row for sums in another order; a step of 128 k that is missing is a tenth of the row or more."""


@dataclass(frozen=True)
class Checked:
    """What was found of one block."""

    same_bits: bool
    """Whether launches repeat themselves."""
    difference: float
    """Largest from a single call, of a result and the root mean square of its row."""

    @property
    def within_rounding(self) -> bool:
        """Whether it is as small as it must be; what is no number is not."""
        return self.difference <= ROUNDING


def check(library: Library, block: Any, chain: Call, ys: Sequence[torch.Tensor]) -> Checked:
    """Launch a block some times and its layers once, and compare.

    Args:
        library: computes.
        block: an array of LinearParams, one for each layer.
        chain: the call of all of them.
        ys: what they write, [m, n] each.
    """
    first = _launched(chain, ys)
    same = all(y.isfinite().all() for y in first)
    for _ in range(REPETITIONS - 1):
        again = _launched(chain, ys)
        same = same and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    differences = [
        _difference(y, _alone(library, params, y))
        for params, y in zip(block, _launched(chain, ys), strict=True)
    ]
    return Checked(same, float(torch.tensor(differences).max()))


def _launched(chain: Call, ys: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a launch writes over NaN."""
    for y in ys:
        y.fill_(float("nan"))
    chain()
    torch.cuda.synchronize()
    return [y.clone() for y in ys]


def _alone(library: Library, params: LinearParams, y: torch.Tensor) -> torch.Tensor:
    """Return the result of a single call on what the layer reads now."""
    alone, out = LinearParams.from_buffer_copy(params), torch.full_like(y, float("nan"))
    alone.y = out.data_ptr()
    launch = library.launch(CudaFlag.NONE)
    library.check(
        library.functions.ql_cuda_linear(ctypes.byref(alone), ctypes.byref(launch)), "linear"
    )
    torch.cuda.synchronize()
    return out


def _difference(y: torch.Tensor, alone: torch.Tensor) -> float:
    right = alone.double()
    size = right.abs() + right.square().mean(dim=1, keepdim=True).sqrt()
    return float(((y.double() - right).abs() / size).max())
