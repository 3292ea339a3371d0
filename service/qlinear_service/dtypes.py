"""Names of the element types that cross module borders, free of torch, numpy and protobuf.

The numbers are those of `qlinear.v1.DType` and of `ql_dtype` in csrc/linear_params.h, so that a
value passes from the wire to the kernel unchanged; tests compare all three.
"""

from enum import IntEnum

__all__ = ["DType"]


class DType(IntEnum):
    """Element type of activations, results, scales and biases."""

    F16 = 1
    BF16 = 2
    F32 = 3

    # Enum's own hash is a Python function, and dtypes are part of every key of the queue.
    __hash__ = int.__hash__

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.F32 else 2

    @property
    def text(self) -> str:
        """The name that people read: float16, bfloat16 or float32."""
        return {DType.F16: "float16", DType.BF16: "bfloat16", DType.F32: "float32"}[self]

    @classmethod
    def from_text(cls, text: str) -> "DType":
        """Return the type named `text`.

        Raises:
            ValueError: `text` is none of float16, bfloat16, float32.
        """
        for dtype in cls:
            if dtype.text == text:
                return dtype
        raise ValueError(f"dtype is {text!r}; expected float16, bfloat16 or float32")
