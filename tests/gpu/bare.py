"""Device memory and packed layers without torch, for what runs under compute-sanitizer.

Each tensor is an allocation of its own of exactly its size, and what is not written stays
uninitialized, so that a byte read too far or too early is seen.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from qlinear_service.dtypes import DType
from qlinear_service.kernels import layout
from qlinear_service.kernels.abi import LinearParams

COUNTER_BYTES = 1024 * 1024
Array = npt.NDArray[np.generic]


class Memory:
    """Device memory through the driver: one allocation for each array."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._taken: list[int] = []

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        assert status == 0, f"{name}: CUDA driver error {status}"

    def take(self, nbytes: int) -> int:
        """Return the address of uninitialized memory."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self._taken.append(address.value)
        return address.value

    def put(self, array: Array) -> int:
        """Return the address of a copy of `array`."""
        whole = np.ascontiguousarray(array)
        address = self.take(whole.nbytes)
        pointer = ctypes.c_void_p(whole.ctypes.data)
        self._call(
            "cuMemcpyHtoD_v2", ctypes.c_uint64(address), pointer, ctypes.c_size_t(whole.nbytes)
        )
        return address

    def clear(self, address: int, nbytes: int) -> None:
        """Write zeros."""
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), 0, ctypes.c_size_t(nbytes))

    def get(self, address: int, like: Array) -> Array:
        """Wait for the device and return what lies there."""
        self._call("cuCtxSynchronize")
        found = np.empty_like(like)
        pointer = ctypes.c_void_p(found.ctypes.data)
        self._call(
            "cuMemcpyDtoH_v2", pointer, ctypes.c_uint64(address), ctypes.c_size_t(found.nbytes)
        )
        return found

    def give_back(self) -> None:
        """Free everything."""
        for address in self._taken:
            self._call("cuMemFree_v2", ctypes.c_uint64(address))
        self._taken.clear()


def encoded(values: npt.NDArray[np.float32], dtype: int) -> Array:
    """Return small numbers as the library reads them."""
    if dtype == DType.BF16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16 if dtype == DType.F16 else np.float32)


def rounded(values: npt.NDArray[np.float32], dtype: int) -> Array:
    """Return results as the library stores them, bfloat16 as its bits."""
    if dtype == DType.BF16:
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return values.astype(np.float16 if dtype == DType.F16 else np.float32)


@cache
def places(n: int, k: int, bits: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the byte and the shift of every code, [n, k]."""
    i, j = np.arange(n, dtype=np.int64)[:, None], np.arange(k, dtype=np.int64)[None]
    byte, shift = layout.code_place(i, j, layout.round_up(k, layout.PAD_K), bits)  # type: ignore[arg-type]
    return np.broadcast_to(byte, (n, k)), np.broadcast_to(shift, (n, k))


@dataclass(frozen=True)
class Packed:
    """A layer's tensors in the runtime layout, and the weights that they mean."""

    qweight: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    """[n / 16, groups, 16]; powers of two."""
    zeros: npt.NDArray[np.uint8]
    """Alike."""
    weights: npt.NDArray[np.float32]
    """[n, k]."""


def drawn_layer(draw: np.random.Generator, params: LinearParams, *, zeros: bool) -> Packed:
    """Return a layer of these sizes, bits and groups; without `zeros` it is symmetric."""
    n, k, bits, group_size = params.n, params.k, params.bits, params.group_size
    n_padded, k_padded = layout.round_up(n, layout.PAD_N), layout.round_up(k, layout.PAD_K)
    groups = layout.group_count(k_padded, group_size)
    qweight = draw.integers(0, 256, layout.qweight_bytes(n_padded, k_padded, bits), dtype=np.uint8)
    scales = np.exp2(draw.integers(-2, 1, (n_padded // 16, groups, 16))).astype(np.float32)
    zero_points = draw.integers(0, 2**bits, scales.shape, dtype=np.uint8)
    byte, shift = places(n, k, bits)
    codes = (qweight[byte] >> shift & (2**bits - 1)).astype(np.int64)
    rows = np.arange(n)
    position = 2 * (rows % 8) + rows % 16 // 8
    group = np.zeros(k, np.int64) if group_size == -1 else np.arange(k) // group_size
    scale_of = scales[rows[:, None] // 16, group, position[:, None]]
    zero_of = zero_points[rows[:, None] // 16, group, position[:, None]].astype(np.int64)
    weights = scale_of * (codes - (zero_of if zeros else 2 ** (bits - 1)))
    return Packed(qweight, scales, zero_points, weights.astype(np.float32))
