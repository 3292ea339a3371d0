"""Which products of a chain one launch computes, through the C interface, without a GPU."""

import ctypes
from typing import Any

import pytest
from tuned_tables import FAKE_H200

from qlinear_service.dtypes import DType
from qlinear_service.kernels import build, cuda_abi
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda_abi import CudaDevice
from qlinear_service.kernels.planner import problem

ADDRESS = 1 << 20
"""Where all tensors pretend to lie; nobody looks."""

BLOCK = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # (n, k)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    path = build.build_cpu_library(build.default_cache_dir())
    return cuda_abi.declare(ctypes.CDLL(str(path)), cuda_abi.PLANNER_FUNCTIONS)


def product(n: int = 4096, k: int = 4096, m: int = 1, **changed: Any) -> LinearParams:
    """Return one that the kernel of chains computes, but for what is changed."""
    params = problem(m=m, n=n, k=k, bits=4, group_size=128)
    params.x = params.qweight = params.scales = params.y = ADDRESS
    for name, value in changed.items():
        setattr(params, name, value)
    return params


def length(library: ctypes.CDLL, *products: LinearParams, device: CudaDevice = FAKE_H200) -> int:
    params = (LinearParams * len(products))(*products)
    return int(library.ql_cuda_chain_length(params, len(products), device))


@pytest.mark.parametrize("m", range(1, 17))
@pytest.mark.parametrize("group_size", [-1, 128])
def test_layers_of_a_block_are_one_launch(library: ctypes.CDLL, m: int, group_size: int) -> None:
    for dtype in (DType.F16, DType.BF16):
        same = {"x_dtype": dtype, "scale_dtype": dtype, "compute_dtype": dtype}
        block = [product(*shape, m, group_size=group_size, **same) for shape in BLOCK]
        assert length(library, *block) == 4


def test_eight_at_most_and_not_one_alone(library: ctypes.CDLL) -> None:
    counts = [length(library, *[product()] * count) for count in (1, 2, 8, 9, 17)]
    assert counts == [0, 2, 8, 8, 8]


@pytest.mark.parametrize(
    "changed",
    [
        {"bits": 8},
        {"zeros": ADDRESS},
        {"group_size": 32},
        {"group_size": 64},
        {"m": 17},
        {"m": 2},  # others have one row
        {"m": 0},
        {"n": 0},
        {"n": -64},
        {"k": 4096 + 32},
        {"scale_dtype": DType.F32},
        {"scale_dtype": DType.BF16},
        {"x_dtype": DType.F32},
        {"x_dtype": DType.BF16, "scale_dtype": DType.BF16},  # others have fp16
        {"x": ADDRESS + 8},
        {"x": None},
        {"qweight": ADDRESS + 32},
        {"qweight": None},
        {"scales": ADDRESS + 8},
        {"scales": None},
        {"y": None},
        {"bias_dtype": 9},
    ],
    ids=str,
)
def test_a_product_that_its_kernel_cannot_compute_ends_it(
    library: ctypes.CDLL, changed: dict[str, Any]
) -> None:
    wrong = product(**changed)
    assert length(library, product(), product(), wrong, product()) == 2
    assert length(library, product(), wrong, product(), product()) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"y": ADDRESS + 2},
        {"y_dtype": DType.F32},
        {"bias": ADDRESS + 2, "bias_dtype": DType.BF16},
        {"k": 4096 + 64, "x_row_stride": 4096 + 64},
        {"x_row_stride": 3},  # of a single row it means nothing
        {"n": 4096 - 7},
    ],
    ids=str,
)
def test_what_its_kernel_takes_as_well(library: ctypes.CDLL, changed: dict[str, Any]) -> None:
    assert length(library, product(), product(**changed), product()) == 3


def test_rows_that_cannot_be_copied(library: ctypes.CDLL) -> None:
    """Rows of x begin at multiples of 16 bytes."""
    strides = {stride: product(m=3, x_row_stride=4096 + stride) for stride in (0, 4, 8)}
    found = {stride: length(library, one, one) for stride, one in strides.items()}
    assert found == {0: 2, 4: 0, 8: 2}


def test_more_rows_than_it_holds_are_none(library: ctypes.CDLL) -> None:
    assert [length(library, product(m=m), product(m=m)) for m in (16, 17, 64)] == [2, 0, 0]


def test_shares_that_are_too_uneven_are_none(library: ctypes.CDLL) -> None:
    """The largest of 132 shares of 236 n-blocks is 1.119 times the mean, of 232 1.138."""
    even, uneven = product(236 * 16), product(232 * 16)
    assert (length(library, even, even), length(library, uneven, uneven)) == (2, 0)
    assert length(library, product(1024), product(1024)) == 0
    # A small layer beside large ones is no matter; the sum counts.
    assert length(library, product(28672), product(1024)) == 2


def test_devices_without_the_copy_engine_and_nonsense(library: ctypes.CDLL) -> None:
    for changed in (
        *({"major": 8}, {"major": 10}, {"major": 0}, {"sm_count": 0}, {"sm_count": -1}),
        {"driver_version": 12000},
    ):
        device = CudaDevice.from_buffer_copy(FAKE_H200)
        for name, value in changed.items():
            setattr(device, name, value)
        assert length(library, product(), product(), device=device) == 0
    params = (LinearParams * 2)(product(), product())
    assert library.ql_cuda_chain_length(None, 2, FAKE_H200) == 0
    assert library.ql_cuda_chain_length(params, 2, None) == 0
    for count in (0, -1):
        assert library.ql_cuda_chain_length(params, count, FAKE_H200) == 0
