"""Arrays to wire bytes and back: numpy, anything with the buffer protocol, torch.

torch is used only if the caller has already imported it; nothing here imports it. Knows no
messages and no channels. Every function returns new memory: a result may be written to, and an
argument may be changed as soon as the call has started.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlinear.v1 import linear_pb2 as pb
from qlinear_client._errors import InvalidArgument

try:
    import ml_dtypes
except ImportError:  # numpy has no bfloat16 of its own
    ml_dtypes = None  # type: ignore[assignment]

__all__ = ["ELEMENTS", "Activations", "Element", "element_of", "read_activations"]


@dataclass(frozen=True, slots=True)
class Element:
    """An element type of the wire."""

    number: pb.DType
    name: str
    itemsize: int


ELEMENTS = {
    element.name: element
    for element in (
        Element(pb.DTYPE_F16, "float16", 2),
        Element(pb.DTYPE_BF16, "bfloat16", 2),
        Element(pb.DTYPE_F32, "float32", 4),
    )
}

Restore = Callable[[bytes, Sequence[int], Element], Any]


@dataclass(frozen=True, slots=True)
class Activations:
    """One x, ready to be sent, and the way back into the caller's array library."""

    element: Element
    shape: tuple[int, ...]
    """[..., k]"""
    raw: bytes
    """Little-endian, row-major, contiguous."""
    restore: Restore
    """Makes an array of the library (and device) of x from a result's bytes."""
    restores_bfloat16: bool
    """False: numpy without ml_dtypes, which has no array for bfloat16 results."""

    @property
    def rows(self) -> int:
        """All leading dimensions, flattened."""
        return math.prod(self.shape[:-1])


def element_of(dtype: object) -> Element:
    """Return the element type that a name, a numpy dtype or scalar type, or a torch dtype means.

    Raises:
        InvalidArgument: it is none of the three that travel.
    """
    name = dtype if isinstance(dtype, str) else _dtype_name(dtype)
    element = ELEMENTS.get(name)
    if element is None:
        raise InvalidArgument(
            f"dtype {name} is not one that the service computes; "
            "expected float16, bfloat16 or float32"
        )
    return element


def read_activations(x: object) -> Activations:
    """Return `x` as wire bytes, made contiguous and little-endian.

    Raises:
        InvalidArgument: not an array, no dimension, or another dtype than the three that travel.
    """
    torch = sys.modules.get("torch")
    tensor_type = getattr(torch, "Tensor", None)  # None while torch is only half imported
    if tensor_type is not None and isinstance(x, tensor_type):
        return _read_tensor(x, torch)
    return _read_array(_as_array(x))


def _dtype_name(dtype: object) -> str:
    """Name an element type as numpy does: torch.float16 and np.float16 are both "float16"."""
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)  # type: ignore[call-overload]
    except TypeError:
        return text


def _element_of_x(dtype: object, convert: str) -> Element:
    name = _dtype_name(dtype)
    element = ELEMENTS.get(name)
    if element is None:
        raise InvalidArgument(
            f"x has dtype {name}; expected float16, bfloat16 or float32: "
            f"convert it first, for example with {convert}"
        )
    return element


def _require_dimension(shape: tuple[int, ...]) -> None:
    if not shape:
        raise InvalidArgument("x is a single number; expected an array of shape [..., k]")


def _as_array(x: object) -> npt.NDArray[Any]:
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x)
    is_array = hasattr(x, "__array__") or hasattr(x, "__array_interface__")
    if not is_array:
        try:
            memoryview(x)  # type: ignore[arg-type]
        except TypeError:
            raise InvalidArgument(
                f"x is a {type(x).__name__}; expected a numpy array, a torch tensor "
                "or an object with the buffer protocol"
            ) from None
    return np.asarray(x)


def _read_array(x: npt.NDArray[Any]) -> Activations:
    element = _element_of_x(x.dtype, "x.astype(np.float32)")
    _require_dimension(x.shape)
    # Swaps the bytes of a big-endian array; otherwise no copy. tobytes() is in row-major order
    # whatever the strides are.
    little = x.astype(x.dtype.newbyteorder("<"), copy=False)
    return Activations(
        element=element,
        shape=x.shape,
        raw=little.tobytes(),
        restore=_restore_array,
        restores_bfloat16=ml_dtypes is not None,
    )


def _restore_array(raw: bytes, shape: Sequence[int], element: Element) -> npt.NDArray[Any]:
    # A view of `raw` would be read-only. One copy (well under 1 % of a call) makes the result an
    # ordinary array, which callers may write to and hand to torch.from_numpy.
    dtype = ml_dtypes.bfloat16 if element.name == "bfloat16" else np.dtype(f"<f{element.itemsize}")
    return np.frombuffer(bytearray(raw), dtype).reshape(shape)


def _read_tensor(x: Any, torch: Any) -> Activations:
    element = _element_of_x(x.dtype, "x.float()")
    _require_dimension(tuple(x.shape))
    if x.layout is not torch.strided or x.is_meta:
        raise InvalidArgument(
            f"x is a {'meta' if x.is_meta else x.layout} tensor; expected a dense one with values"
        )
    device = x.device

    def restore(raw: bytes, shape: Sequence[int], element: Element) -> Any:
        dtype = getattr(torch, element.name)
        if not raw:  # torch.frombuffer refuses an empty buffer
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        flat = torch.frombuffer(bytearray(raw), dtype=dtype)
        return flat.reshape(tuple(shape)).to(device)

    # numpy has no bfloat16: two-byte elements pass through as integers of the same bits.
    same_bits = torch.int16 if element.itemsize == 2 else torch.int32
    # The view sees memory, not values, so a lazily negated tensor has to be made real first.
    values = x.detach().cpu().resolve_neg().view(same_bits).numpy()
    return Activations(
        element=element,
        shape=tuple(x.shape),
        raw=values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes(),
        restore=restore,
        restores_bfloat16=True,
    )
