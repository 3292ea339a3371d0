"""Large batches: slabs of dequantized weights, multiplied by torch."""

import ctypes
import itertools

import pytest
import torch
from closeness import assert_close
from random_layers import random_layer

from qlinear_service.dtypes import DType
from qlinear_service.kernels import build, layout, packing
from qlinear_service.kernels.backends import CpuBody, CpuKernels
from qlinear_service.kernels.torch_types import to_torch

LIBRARY = build.build_cpu_library(build.default_cache_dir())


@pytest.fixture
def slab_kernels() -> CpuKernels:
    """Kernels that multiply everything by slabs."""
    return CpuKernels(LIBRARY, threads=2, body=CpuBody.PLAIN, slab_rows={CpuBody.PLAIN: 1})


@pytest.mark.parametrize("bits", layout.BITS)
@pytest.mark.parametrize("group_size", layout.GROUP_SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_slabs_of_dequantized_weights(
    slab_kernels: CpuKernels, bits: int, group_size: int, symmetric: bool
) -> None:
    for scale_dtype, x_dtype in itertools.product(DType, DType):
        layer = random_layer(
            n=150, k=1100, bits=bits, group_size=group_size, symmetric=symmetric,
            scale_dtype=scale_dtype, bias=True, permuted=symmetric,
        )  # fmt: skip
        x = torch.randn(3, 1100, generator=torch.Generator().manual_seed(1)).to(to_torch(x_dtype))
        assert_close(slab_kernels, layer, x, DType.F16)


def test_slabs_are_taken_from_their_row_count_on(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = CpuKernels(LIBRARY, threads=1, body=CpuBody.PLAIN)
    calls: list[int] = []
    monkeypatch.setattr(
        CpuKernels, "_multiply_slabs", lambda self, layer, params, x, y: calls.append(len(x))
    )
    layer = packing.pack(random_layer(n=64, k=128))
    for rows in (1, 7, 8, 9):
        kernels.linear(layer, torch.ones(rows, 128).half(), DType.F16)
    assert calls == [8, 9]


@pytest.mark.parametrize(
    ("begin", "count", "status"),
    [
        (0, 64, 0), (16, 48, 0), (64, 0, 0), (8, 16, 1), (-16, 16, 1), (0, 65, 1), (80, 0, 1),
        (16, 2**63 - 1, 1), (2**63 - 16, 16, 1),  # begin + count does not fit 64 bits
    ],
)  # fmt: skip
def test_dequantize_checks_its_range(begin: int, count: int, status: int) -> None:
    kernels = CpuKernels(LIBRARY, threads=1)
    layer = packing.pack(random_layer(n=64, k=128))
    out = torch.empty(64, 128)
    given = kernels._library.ql_cpu_dequantize(
        ctypes.byref(kernels._params(layer)),
        ctypes.c_int64(begin),
        ctypes.c_int64(count),
        ctypes.c_void_p(out.data_ptr()),
    )
    assert given == status
