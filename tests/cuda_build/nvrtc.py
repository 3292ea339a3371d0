"""Compiles a source of the GPU library with NVRTC and ptxas of CUDA 12.9, as packages from PyPI.

NVRTC takes device code alone. Functions without an annotation count as device code here, so that
sources go in as they are, launches included: what it cannot take is a header or a call that only a
host has. What stands in for the headers that it does not have is in HEADERS.
"""

import ctypes
import subprocess
from pathlib import Path

from cuda_tools import packages_folder

__all__ = ["assemble", "compile_to_ptx", "missing_packages"]

INTEGERS = """
#pragma once
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
"""

# Launches and their errors are known on the device, too; this one function is not.
RUNTIME = """
#pragma once
#include <cuda_device_runtime_api.h>
template <typename Function>
cudaError_t cudaFuncSetAttribute(Function*, cudaFuncAttribute, int);
"""

HEADERS = {"cstdint": INTEGERS, "stdint.h": INTEGERS, "cuda_runtime_api.h": RUNTIME}

FOLDER = packages_folder()
NVRTC = FOLDER / "cuda_nvrtc/lib/libnvrtc.so.12"
PTXAS = FOLDER / "cuda_nvcc/bin/ptxas"
INCLUDE = FOLDER / "cuda_runtime/include"


def missing_packages() -> list[str]:
    """The packages that are not installed."""
    needed = {
        "nvidia-cuda-nvrtc-cu12": NVRTC,
        "nvidia-cuda-nvcc-cu12": PTXAS,
        "nvidia-cuda-runtime-cu12": INCLUDE,
    }
    return [name for name, path in needed.items() if not path.exists()]


def compile_to_ptx(source: Path, architecture: str, *, include: Path) -> tuple[bytes | None, str]:
    """Return the PTX, None if it does not compile, and all that NVRTC said."""
    library = ctypes.CDLL(str(NVRTC))
    names = (ctypes.c_char_p * len(HEADERS))(*(name.encode() for name in HEADERS))
    texts = (ctypes.c_char_p * len(HEADERS))(*(text.encode() for text in HEADERS.values()))
    program = ctypes.c_void_p()
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), b"source", len(HEADERS), texts, names
    )
    assert status == 0
    options = [
        f"--gpu-architecture=compute_{architecture}",
        "--std=c++17",
        "--device-as-default-execution-space",
        f"-I{include}",
        f"-I{INCLUDE}",
    ]
    if "<<<" in source.read_text():  # from the device, launches need another linker
        options.append("--relocatable-device-code=true")
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = library.nvrtcCompileProgram(program, len(options), words)
    log = _text(library, program, "ProgramLog").decode(errors="replace").strip()
    ptx = _text(library, program, "PTX") if status == 0 else None
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx, log


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(library, f"nvrtcGet{what}")(program, text) == 0
    return text.value


def assemble(ptx: bytes, architecture: str, folder: Path) -> tuple[int, str]:
    """Return ptxas's exit code and all that it said, -v included."""
    path = folder / "kernels.ptx"
    path.write_bytes(ptx)
    words = ["-v", f"-arch=sm_{architecture}", str(path), "-o", "kernels.cubin"]
    if b".extern .func" in ptx:
        words.append("--compile-only")
    done = subprocess.run(
        [PTXAS, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    return done.returncode, done.stdout + done.stderr
