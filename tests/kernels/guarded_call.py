"""Runs every CPU body on tensors between forbidden pages: one byte too far is a crash.

A program of its own, started by test_memory_bounds.py; exits with 0 if nothing was overrun.
"""

import ctypes
import itertools
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from random_layers import random_layer

from qlinear_service.dtypes import DType
from qlinear_service.kernels import build, layout, packing
from qlinear_service.kernels.abi import CpuBody, LinearParams
from qlinear_service.kernels.backends import CpuKernels
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import QuantizedLinear

PAGE = mmap.PAGESIZE
# The last has enough work for the second thread.
SHAPES = ((1, 1, 1), (9, 70, 200), (5, 17, 1100), (2, 64, 200), (1, 64, 1024), (9, 130, 1100))
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
rooms: list[tuple[int, int]] = []

Guard = Callable[[torch.Tensor], int]


def _room(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first and the last address of fresh pages, with forbidden ones on both sides."""
    nbytes = tensor.numel() * tensor.element_size()
    inside = -(-nbytes // PAGE) * PAGE
    base = int(libc.mmap(None, ctypes.c_size_t(inside + 2 * PAGE), 3, 0x22, -1, 0))
    rooms.append((base, inside + 2 * PAGE))
    for guard in (base, base + PAGE + inside):
        assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0) == 0
    return base + PAGE, base + PAGE + inside


def _copied(tensor: torch.Tensor, address: int) -> int:
    whole = tensor.contiguous()
    ctypes.memmove(address, whole.data_ptr(), whole.numel() * whole.element_size())
    return address


def guarded_end(tensor: torch.Tensor) -> int:
    """Return the address of a copy of `tensor` whose last byte is followed by a forbidden page."""
    return _copied(tensor, _room(tensor)[1] - tensor.numel() * tensor.element_size())


def guarded_front(tensor: torch.Tensor) -> int:
    """Return the address of a copy of `tensor` whose first byte follows a forbidden page."""
    return _copied(tensor, _room(tensor)[0])


def call(
    kernels: CpuKernels, layer: QuantizedLinear, *, m: int, x_dtype: DType, guard: Guard
) -> int:
    """Call the library with guarded tensors and return its status."""
    n, k = layer.spec.n, layer.spec.k
    assert layer.bias is not None
    params: LinearParams = kernels._params(layer)
    params.qweight, params.scales = guard(layer.qweight), guard(layer.scales)
    if layer.zeros is not None:
        params.zeros = guard(layer.zeros)
    params.bias = guard(layer.bias[:n])
    x, y = (torch.ones(m, width).to(to_torch(x_dtype)) for width in (k, n))
    params.x, params.y = guard(x), guard(y)
    params.m, params.x_row_stride, params.y_row_stride = m, k, n
    params.x_dtype = params.y_dtype = x_dtype
    status = kernels._library.ql_cpu_linear(ctypes.byref(params))
    out = guard(torch.ones(n, k))
    range_and_out = (ctypes.c_int64(0), ctypes.c_int64(n), ctypes.c_void_p(out))
    status = status or kernels._library.ql_cpu_dequantize(ctypes.byref(params), *range_and_out)
    while rooms:
        base, nbytes = rooms.pop()
        assert libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(nbytes)) == 0
    return int(status)


def main() -> int:
    """Call every body that runs here on every format, in shapes with ragged ends."""
    library_path = build.build_cpu_library(build.default_cache_dir())
    calls = 0
    for body, bits, group_size, symmetric, (m, n, k) in itertools.product(
        CpuBody, layout.BITS, layout.GROUP_SIZES, (True, False), SHAPES
    ):
        layer = packing.pack(
            random_layer(n=n, k=k, bits=bits, group_size=group_size, symmetric=symmetric, bias=True)
        )
        kernels = CpuKernels(library_path, threads=2, body=body)
        for guard, x_dtype in itertools.product((guarded_end, guarded_front), DType):
            status = call(kernels, layer, m=m, x_dtype=x_dtype, guard=guard)
            assert status in (0, 7), status  # 7: not a body of this processor
            calls += status == 0
    print(calls)
    return 0 if calls else 1


if __name__ == "__main__":
    sys.exit(main())
