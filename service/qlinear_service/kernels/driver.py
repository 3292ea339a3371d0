"""Asks the NVIDIA driver what is there, without torch and without our own library.

So that a library can be built for the GPUs of this machine alone, and so that `qlinear doctor` can
tell a missing driver from one that is too old. Standard library only.
"""

import ctypes
import re
from dataclasses import dataclass

__all__ = ["Driver", "Gpu", "ask_driver"]

DRIVER_LIBRARY = "libcuda.so.1"

# Of cuda.h.
CUDA_ERROR_NO_DEVICE = 100
COMPUTE_CAPABILITY_MAJOR = 75
COMPUTE_CAPABILITY_MINOR = 76
NAME_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as the driver shows it to this process."""

    ordinal: int
    name: str
    major: int
    minor: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What the driver said."""

    problem: str = ""
    """Why no GPU can be used; "" if one can."""
    cuda_version: tuple[int, int] | None = None
    """The newest CUDA release that the driver runs; None without a driver."""
    gpus: tuple[Gpu, ...] = ()

    def problem_with(self, compiler: str) -> str:
        """Return why this driver cannot run what a compiler, "nvcc V13.0.88", has built; or ""."""
        release = re.search(r"V(\d+)\.(\d+)", compiler)
        if self.cuda_version is None or release is None:
            return ""
        # Within a major release older drivers run newer libraries.
        if int(release[1]) <= self.cuda_version[0]:
            return ""
        runs = ".".join(map(str, self.cuda_version))
        return (
            f"was built with CUDA {release[1]}.{release[2]}, and the driver runs CUDA up to {runs}"
            f": install a newer driver, or build with an nvcc of CUDA {self.cuda_version[0]} "
            f"(NVCC names one)"
        )


def ask_driver() -> Driver:
    """Return what the driver of this machine says; never raises for what is missing."""
    try:
        library = ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return Driver(problem=f"there is no NVIDIA driver: {DRIVER_LIBRARY} cannot be loaded")
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return Driver(problem=f"{DRIVER_LIBRARY} does not tell its version")
    cuda_version = (version.value // 1000, version.value % 1000 // 10)
    status = library.cuInit(0)
    if status == CUDA_ERROR_NO_DEVICE:
        problem = "the NVIDIA driver shows no GPU to this process (CUDA_VISIBLE_DEVICES?)"
        return Driver(problem=problem, cuda_version=cuda_version)
    if status != 0:
        problem = f"the NVIDIA driver does not start: cuInit answers {_error(library, status)}"
        return Driver(problem=problem, cuda_version=cuda_version)
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    return Driver(
        cuda_version=cuda_version,
        gpus=tuple(_gpu(library, ordinal) for ordinal in range(count.value)),
    )


def _gpu(library: ctypes.CDLL, ordinal: int) -> Gpu:
    device = ctypes.c_int()
    library.cuDeviceGet(ctypes.byref(device), ordinal)
    name = ctypes.create_string_buffer(NAME_BYTES)
    library.cuDeviceGetName(name, NAME_BYTES, device)
    memory_bytes = ctypes.c_size_t()
    library.cuDeviceTotalMem_v2(ctypes.byref(memory_bytes), device)
    capability = []
    for attribute in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR):
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Gpu(
        ordinal=ordinal,
        name=name.value.decode(errors="replace"),
        major=capability[0],
        minor=capability[1],
        memory_bytes=memory_bytes.value,
    )


def _error(library: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorName(status, ctypes.byref(text))
    return f"{(text.value or b'an unknown error').decode()} ({status})"
