"""Problems and plans that together take every kernel of the library. Knows no torch."""

import ctypes
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from qlinear_service.dtypes import DType
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda_abi import CudaDevice, CudaFlag, CudaPlan

SIZES = ((70, 200), (64, 1024), (4096, 4096), (200, 11008), (8192, 512))
ROWS = (1, 3, 9, 13, 17, 30, 33, 61, 77, 130, 250, 512, 1030, 4096)


class Planned(NamedTuple):
    """A problem without pointers, and a plan for it."""

    params: LinearParams
    plan: CudaPlan
    default: bool
    """Whether it is what this GPU would do by itself."""


def described_device(name: str, major: int, minor: int, sms: int, kibibytes: int) -> CudaDevice:
    """Return a GPU of any kind, for plans."""
    return CudaDevice(
        name=name.encode(), major=major, minor=minor, sm_count=sms, supported=1,
        shared_bytes_per_block=kibibytes * 1024, shared_bytes_per_sm=(kibibytes + 1) * 1024,
        l2_bytes=48 << 20, memory_bytes=24 << 30, driver_version=13000, runtime_version=13000,
    )  # fmt: skip


def problems() -> Iterator[LinearParams]:
    """Yield problems of every format, smallest first; all pointers are null."""
    for (n, k), m in itertools.product(SIZES, ROWS):
        for bits, group, dtype in itertools.product((4, 8), (128, 32, 64, -1), (1, 2)):
            yield LinearParams(
                m=m, n=n, k=k, x_row_stride=k, y_row_stride=n, group_size=group, bits=bits,
                x_dtype=dtype, compute_dtype=dtype, scale_dtype=DType.F16, bias_dtype=DType.F16,
                y_dtype=DType.F32, threads=1,
            )  # fmt: skip


def plans_of_each_kernel(
    library: ctypes.CDLL, device: CudaDevice, per_kernel: int = 1
) -> dict[int, list[Planned]]:
    """Return for each kernel the smallest problems that the planner takes it for.

    This GPU's own choices first, then those for one that has nothing of the newest kind: a newer
    GPU can run all of them.
    """
    found: dict[int, list[Planned]] = {}
    oldest = described_device("oldest", 8, 0, device.sm_count, 163)
    for described, flags in itertools.product((device, oldest), CudaFlag.__members__.values()):
        for params in problems():
            plan = CudaPlan()
            if library.ql_cuda_plan_linear(params, described, flags, plan) == 0:
                kept = found.setdefault(plan.kernel, [])
                if len(kept) < per_kernel:
                    default = described is device and flags == CudaFlag.NONE
                    kept.append(Planned(params, plan, default))
    return found
