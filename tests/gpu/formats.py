"""The kernels of a library by their names, and plans that take each of them. Knows no torch."""

import ctypes
import re
from dataclasses import dataclass

from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda_abi import CudaDevice, CudaPlan

NAME = re.compile(r"linear_(f16|bf16)_b(4|8)_rows(\d+)_(g128|g32_64|g_any)((?:_[a-z]+)*)")
MARKS = {"fed": "copy_warp", "wgmma": "warpgroups"}
"""Ends of names, and the field of a plan that each of them stands for."""

ARRANGEMENTS = ((4, 2), (2, 2), (4, 1), (8, 1), (1, 1))
"""Warps along n and along k: what must share most comes first; each kernel can have one of them."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What a kernel's name says of it."""

    number: int
    name: str
    dtype: DType
    """Of x, after float32 was rounded."""
    bits: int
    groups: str
    """Sizes that it is for, as its name says."""
    token_blocks: int
    """Blocks of eight rows of x in a tile."""
    marks: tuple[str, ...]
    """Fields of a plan that are 1."""

    @property
    def tile(self) -> tuple[int, tuple[str, ...]]:
        """What a plan must say to take it, whatever the format."""
        return self.token_blocks, self.marks

    @property
    def group_size(self) -> int:
        """One of those that it is for."""
        return 128 if self.groups == "g128" else 32

    @property
    def rounds(self) -> bool:
        """Whether it rounds weights, and so takes scales and gives results of x's dtype alone."""
        return bool(self.marks) and self.groups != "g128"

    def takes(self, bits: int, group_size: int) -> bool:
        """Say whether it is for layers of this format."""
        fine = group_size in (32, 64)
        return bits == self.bits and self.groups in ("g_any", "g32_64" if fine else "g128")

    def runs_on(self, device: CudaDevice) -> bool:
        """Say whether a GPU has what the kernel is made of."""
        hopper = (device.major, device.minor) == (9, 0)
        return hopper or not self.marks

    def plan(self, *, warps: tuple[int, int], stages: int, ctas: int, whole_tiles: int) -> CudaPlan:
        """Return a plan that takes this kernel; warps along n and along k.

        Where kernels know no split tiles a cluster of up to eight thread blocks shares a tile's k.
        """
        plan = CudaPlan(
            token_blocks=self.token_blocks, warps_n=warps[0], warps_k=warps[1], stages=stages,
            ctas=ctas, whole_tiles=whole_tiles,
        )  # fmt: skip
        for mark in self.marks:
            setattr(plan, mark, 1)
        if plan.copy_warp:
            plan.tile_blocks = warps[0] * (4 if self.token_blocks <= 2 else 1)
            plan.cluster = 1 if whole_tiles else min(ctas, 8)
            plan.ctas = ctas if whole_tiles else plan.cluster
            plan.whole_tiles = 1
        return plan


def kernels_of(library: ctypes.CDLL) -> list[Kernel]:
    """Return all kernels of a declared library."""
    found = []
    for number in range(library.ql_cuda_kernel_count()):
        name = library.ql_cuda_kernel_name(number).decode()
        parts = NAME.fullmatch(name)
        assert parts is not None, f"kernel {number} has the unexpected name {name!r}"
        found.append(
            Kernel(
                number=number,
                name=name,
                dtype=DType.F16 if parts[1] == "f16" else DType.BF16,
                bits=int(parts[2]),
                groups=parts[4],
                token_blocks=int(parts[3]) // 8,
                marks=tuple(MARKS[mark] for mark in parts[5].split("_")[1:]),
            )
        )
    return found


def described_device(name: str, major: int, minor: int, sms: int, kibibytes: int) -> CudaDevice:
    """Return a GPU of any kind, for plans."""
    return CudaDevice(
        name=name.encode(), major=major, minor=minor, sm_count=sms, supported=1,
        shared_bytes_per_block=kibibytes * 1024, shared_bytes_per_sm=(kibibytes + 1) * 1024,
        l2_bytes=48 << 20, memory_bytes=24 << 30, driver_version=13000, runtime_version=13000,
    )  # fmt: skip
