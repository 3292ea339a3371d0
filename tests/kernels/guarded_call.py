"""Runs every CPU body on tensors that end where memory ends: one byte too far is a crash.

A program of its own, started by test_memory_bounds.py; exits with 0 if nothing was overrun.
"""

import ctypes
import mmap
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from random_layers import random_layer

from qlinear_service.dtypes import DType
from qlinear_service.kernels import build, layout, packing
from qlinear_service.kernels.library import CpuBody, CpuKernels, _LinearParams

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
kept: list[object] = []


def guarded(tensor: torch.Tensor) -> int:
    """Return the address of a copy of `tensor` whose last byte is followed by a forbidden page."""
    nbytes = tensor.numel() * tensor.element_size()
    pages = -(-nbytes // PAGE)
    base = libc.mmap(None, ctypes.c_size_t((pages + 1) * PAGE), 3, 0x22, -1, 0)
    assert libc.mprotect(ctypes.c_void_p(base + pages * PAGE), ctypes.c_size_t(PAGE), 0) == 0
    address = int(base) + pages * PAGE - nbytes
    kept.append(tensor)
    ctypes.memmove(address, tensor.contiguous().data_ptr(), nbytes)
    return address


def call(kernels: CpuKernels, *, m: int, n: int, k: int, form: dict[str, object]) -> int:
    """Call the library with guarded tensors and return its status."""
    layer = packing.pack(random_layer(n=n, k=k, bias=True, **form))  # type: ignore[arg-type]
    assert layer.bias is not None
    params: _LinearParams = kernels._params(layer)
    params.qweight, params.scales = guarded(layer.qweight), guarded(layer.scales)
    if layer.zeros is not None:
        params.zeros = guarded(layer.zeros)
    params.bias = guarded(layer.bias[:n])
    params.x, params.y = guarded(torch.ones(m, k).half()), guarded(torch.ones(m, n).half())
    params.m, params.x_row_stride, params.y_row_stride = m, k, n
    params.x_dtype = params.y_dtype = DType.F16
    status = kernels._library.ql_cpu_linear(ctypes.byref(params))
    out = guarded(torch.ones(n, k))
    range_and_out = (ctypes.c_int64(0), ctypes.c_int64(n), ctypes.c_void_p(out))
    return int(status or kernels._library.ql_cpu_dequantize(ctypes.byref(params), *range_and_out))


def main() -> int:
    """Call every body that runs here on every format, in shapes with ragged ends."""
    library_path = build.build_cpu_library(build.default_cache_dir())
    calls = 0
    for body in CpuBody:
        kernels = CpuKernels(library_path, threads=1, body=body)
        for bits in layout.BITS:
            for group_size in layout.GROUP_SIZES:
                for symmetric in (True, False):
                    form = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
                    for m, n, k in (
                        (1, 1, 1),
                        (9, 70, 200),
                        (5, 17, 1100),
                        (2, 64, 200),
                        (1, 64, 1024),
                    ):
                        status = call(kernels, m=m, n=n, k=k, form=form)
                        assert status in (0, 7), status  # 7: not a body of this processor
                        calls += status == 0
    print(calls)
    return 0 if calls else 1


if __name__ == "__main__":
    sys.exit(main())
