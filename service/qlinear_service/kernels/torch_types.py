"""The one bridge between `DType` and torch's element types."""

import torch

from qlinear_service.dtypes import DType

__all__ = ["from_torch", "to_torch"]

_TO_TORCH = {DType.F16: torch.float16, DType.BF16: torch.bfloat16, DType.F32: torch.float32}
_FROM_TORCH = {torch_dtype: dtype for dtype, torch_dtype in _TO_TORCH.items()}


def to_torch(dtype: DType) -> torch.dtype:
    """Return the torch dtype of `dtype`."""
    return _TO_TORCH[dtype]


def from_torch(dtype: torch.dtype) -> DType:
    """Return the `DType` of a torch dtype.

    Raises:
        ValueError: it is none of float16, bfloat16, float32.
    """
    try:
        return _FROM_TORCH[dtype]
    except KeyError:
        raise ValueError(f"dtype is {dtype}; expected float16, bfloat16 or float32") from None
