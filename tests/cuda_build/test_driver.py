"""What the driver is asked, with a made-up driver: CI has none."""

import os
import subprocess
from pathlib import Path

import pytest

from qlinear_service.kernels import driver

# As in cuda.h of CUDA 12 and 13.
SOURCE = """
#include <cstdio>
#include <cstring>
extern "C" {
int cuDriverGetVersion(int* version) { *version = 12090; return VERSION_STATUS; }
int cuInit(unsigned) { return INIT_STATUS; }
int cuGetErrorName(int error, const char** text) {
  *text = error == 3 ? "CUDA_ERROR_NOT_INITIALIZED" : nullptr;
  return error == 3 ? 0 : 1;
}
int cuDeviceGetCount(int* count) { *count = 2; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal + 40; return 0; }
int cuDeviceGetName(char* name, int bytes, int device) {
  std::snprintf(name, bytes, "GPU %d", device);
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = (1ull << 40) + device;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? device - 32 : attribute == 76 ? device - 40 : -1;
  return 0;
}
}
"""


def made_up(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, version: int = 0, init: int = 0
) -> None:
    """Put a driver there that answers its first two questions so."""
    library = folder / "libcuda.so"
    (folder / "driver.cpp").write_text(SOURCE)
    flags = [f"-DVERSION_STATUS={version}", f"-DINIT_STATUS={init}", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, folder / "driver.cpp", "-o", library], check=True)
    monkeypatch.setattr(driver, "DRIVER_LIBRARY", str(library))


def test_every_gpu_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made_up(monkeypatch, tmp_path)
    answer = driver.ask_driver()
    assert (answer.problem, answer.cuda_version) == ("", (12, 9))
    first = driver.Gpu(ordinal=0, name="GPU 40", major=8, minor=0, memory_bytes=(1 << 40) + 40)
    second = driver.Gpu(ordinal=1, name="GPU 41", major=9, minor=1, memory_bytes=(1 << 40) + 41)
    assert answer.gpus == (first, second)


@pytest.mark.parametrize(
    ("version", "init", "problem"),
    [
        (0, 100, "the NVIDIA driver shows no GPU to this process (CUDA_VISIBLE_DEVICES?)"),
        (0, 3, "does not start: cuInit answers CUDA_ERROR_NOT_INITIALIZED (3)"),
        (0, 4, "does not start: cuInit answers an unknown error (4)"),
        (3, 0, "does not tell its version"),
    ],
)
def test_each_way_to_fail_has_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int, init: int, problem: str
) -> None:
    made_up(monkeypatch, tmp_path, version=version, init=init)
    answer = driver.ask_driver()
    assert answer.problem.endswith(problem)
    assert answer.gpus == ()
    assert answer.cuda_version == (None if version else (12, 9))


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has a GPU")
def test_a_machine_without_a_driver_says_so() -> None:
    answer = driver.ask_driver()
    assert answer.problem
    assert answer.gpus == ()
