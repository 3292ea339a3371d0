"""For tests of the CUDA build: tools that may be missing here but not in CI, and small sources."""

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from qlinear_service.errors import BuildError
from qlinear_service.kernels import build_cuda, cuda_library, nvcc
from qlinear_service.kernels.nvcc import find_nvcc

SMALL = """
#include "layout.h"
__global__ void __launch_bounds__(32) doubled(float* x) {
  __shared__ float row[32];
  row[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = row[31 - threadIdx.x] * 2;
}
extern "C" int ql_run(float* x, cudaStream_t stream) {
  doubled<<<1, 32, 0, stream>>>(x);
  return cudaGetLastError();
}
extern "C" int hidden() { return 1; }
extern "C" const char* ql_cuda_architectures() { return QL_CUDA_ARCHITECTURES; }
"""

SPILLING = """
#include "layout.h"
__global__ void __launch_bounds__(1024, 2) spilling(float* x, int rounds) {
  float a[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) a[i] = x[threadIdx.x + i * 1024];
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 96; ++i) a[i] = a[i] * a[(i * 7 + 1) % 96] + x[round];
  }
#pragma unroll
  for (int i = 0; i < 96; ++i) x[threadIdx.x + i * 1024] = a[i];
}
__global__ void __launch_bounds__(32) honest(float* x) { x[threadIdx.x] = 1; }
"""


def require(tool_is_there: bool, how_to_get_it: str) -> None:
    """Skip the test where a tool is missing; fail it in CI, which must not skip in silence."""
    if tool_is_there:
        return
    if os.environ.get("CI_REQUIRE_CUDA") == "1":
        pytest.fail(f"CI must not skip this: {how_to_get_it}")
    pytest.skip(how_to_get_it)


def require_nvcc() -> None:
    """Skip the test, or fail it in CI, where there is no CUDA compiler."""
    try:
        find_nvcc()
    except BuildError as error:
        require(False, f"{error}; or run make cuda")


def packages_folder() -> Path:
    """Where pip puts NVIDIA's packages."""
    return Path(sysconfig.get_path("purelib")) / "nvidia"


def use_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> Path:
    """Make a source of that text all that the GPU library is compiled from; return its file."""
    root = tmp_path / "sources"
    (root / "cuda").mkdir(parents=True)
    (root / "layout.h").write_text("// as others would be\n")
    (root / "status.cpp").touch()
    source = root / "cuda/small.cu"
    source.write_text(text)
    monkeypatch.setattr(build_cuda, "SOURCE_ROOT", root)
    monkeypatch.setattr(cuda_library, "PREBUILT", tmp_path / "package/libqlinear_cuda.so")
    return source


def without_nvcc(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make this look like a machine that has a C++ compiler and ninja, and no nvcc anywhere."""
    folder.mkdir()
    for tool in ("g++", "ninja"):
        found = shutil.which(tool)
        if found is not None:
            (folder / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(folder))
    monkeypatch.setenv("CUDA_PATH", str(folder))
    monkeypatch.setattr(nvcc, "USUAL_HOME", str(folder))
    monkeypatch.setattr(nvcc.sysconfig, "get_path", lambda name: str(folder))


def fake_nvcc(path: Path, release: str) -> None:
    """Put a program there that says it is nvcc of that release."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'release {release}, V{release}.1'\n")
    path.chmod(0o755)
