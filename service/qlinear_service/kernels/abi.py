"""Python mirror of the structs and bodies of csrc/linear_params.h: the same names and order.

The loader compares sizes with the library's own; a test compares the dtype numbers.
"""

import ctypes
from enum import IntEnum

__all__ = ["CpuBody", "GatherParams", "LinearParams"]


class CpuBody(IntEnum):
    """Bodies of the CPU kernel: ql_cpu_body in csrc/linear_params.h."""

    BEST = 0
    PLAIN = 1
    AVX2 = 2
    AVX512 = 3
    AVX512_BF16 = 4


class LinearParams(ctypes.Structure):
    """Mirror of ql_linear_params; the loader compares its size with the library's own."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "qweight", "scales", "zeros", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "x_row_stride", "y_row_stride")),
        ("group_size", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("bits", "x_dtype", "compute_dtype", "scale_dtype")),
        *((name, ctypes.c_int32) for name in ("bias_dtype", "y_dtype", "threads", "body")),
        *((name, ctypes.c_int32) for name in ("weights_fit", "reserved")),
    ]


class GatherParams(ctypes.Structure):
    """Mirror of ql_gather_params."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "permutation", "out")),
        *((name, ctypes.c_int64) for name in ("m", "k", "x_row_stride")),
        *((name, ctypes.c_int32) for name in ("item_bytes", "threads")),
    ]
