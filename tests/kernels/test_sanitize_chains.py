"""The chains that compute-sanitizer is shown, computed by the CPU: what they expect is right."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gpu.bare import Memory
from gpu.sanitize_chains import CHAINS, ChainCase, chains_of, launch_chain
from tuned_tables import FAKE_H200

from qlinear_service.kernels import build, cuda_abi
from qlinear_service.kernels.cuda_abi import CudaDevice

Array = npt.NDArray[np.generic]


class HostMemory(Memory):
    """The same in host memory, spoilt before it is written; qweight begins at 64 bytes."""

    def __init__(self) -> None:
        self.arrays: dict[int, Array] = {}

    def take(self, nbytes: int) -> int:
        room = np.full(nbytes + 64, 0xFF, np.uint8)
        address = int(room.ctypes.data) + -int(room.ctypes.data) % 64
        self.arrays[address] = room
        return address

    def put(self, array: Array) -> int:
        whole = np.ascontiguousarray(array)
        address = self.take(whole.nbytes)
        ctypes.memmove(address, whole.ctypes.data, whole.nbytes)
        return address

    def clear(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def get(self, address: int, like: Array) -> Array:
        found = np.empty_like(like)
        ctypes.memmove(found.ctypes.data, address, found.nbytes)
        return found


class HostLibrary:
    """Chains of the CUDA library, computed by the CPU library, and what is left out or added."""

    def __init__(self, left_out: int = -1, after: Callable[[Any], None] | None = None) -> None:
        path = build.build_cpu_library(build.default_cache_dir())
        self._cpu = cuda_abi.declare(ctypes.CDLL(str(path)), cuda_abi.PLANNER_FUNCTIONS)
        self.ql_cuda_chain_length = self._cpu.ql_cuda_chain_length
        self._left_out, self._after = left_out, after

    def ql_cuda_workspace_bytes(self) -> int:
        return 2 << 20

    def ql_cuda_error_text(self) -> bytes:
        return b"no error"

    def ql_cuda_linear_chain(self, params: Any, plans: None, count: int, launch: Any) -> int:
        for place in range(count):
            if place != self._left_out:
                assert self._cpu.ql_cpu_linear(ctypes.byref(params[place])) == 0
        if self._after is not None:
            self._after(launch)
        return 0


def outcome(library: HostLibrary, case: ChainCase, device: CudaDevice = FAKE_H200) -> str:
    return launch_chain(library, HostMemory(), device, case)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CHAINS, ids=lambda case: case.name)
def test_what_is_expected_is_right(case: ChainCase) -> None:
    assert outcome(HostLibrary(), case) == ""


@pytest.mark.parametrize("place", range(4))
def test_a_layer_that_did_not_run_is_seen(place: int) -> None:
    assert "are wrong" in outcome(HostLibrary(left_out=place), CHAINS[0])


def test_what_is_left_behind_is_seen() -> None:
    def leave(launch: Any) -> None:
        ctypes.memset(launch.workspace + (1 << 20) - 4, 1, 1)

    assert outcome(HostLibrary(after=leave), CHAINS[0]) == "counters are left behind"


def test_where_no_chain_is_one_launch() -> None:
    older = CudaDevice.from_buffer_copy(FAKE_H200)
    older.major = 8
    assert (chains_of(older), chains_of(FAKE_H200)) == ([], CHAINS)
    assert outcome(HostLibrary(), CHAINS[0], older) == "is not one launch"


def test_every_kernel_of_chains_is_there() -> None:
    assert len({case.name for case in CHAINS}) == 4
    assert {(case.dtype, case.m > 8) for case in CHAINS} == {
        (dtype, more) for dtype in (1, 2) for more in (False, True)
    }
