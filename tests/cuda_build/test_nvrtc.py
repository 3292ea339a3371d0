"""The device code gets through an older toolchain, CUDA 12.9, and holds nothing that is the host's.

Images are built with a CUDA 12 compiler, so that hosts with older drivers can run them.
"""

from pathlib import Path

import pytest
from cuda_build import nvrtc
from cuda_tools import require

from qlinear_service.kernels.architectures import ARCHITECTURES
from qlinear_service.kernels.build_cuda import cuda_sources
from qlinear_service.kernels.ninja import SOURCE_ROOT
from qlinear_service.kernels.resources import parse, slow_kernels

MEASURED = ("80", "86", "89", "90a")
"""Elsewhere code has to be right, and may spill with an older compiler."""

DEVICE_SOURCES = [source for source in cuda_sources() if source.endswith(".cu")]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def packages() -> None:
    missing = nvrtc.missing_packages()
    require(not missing, f"{', '.join(missing)} is not installed: make cuda does that")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", DEVICE_SOURCES)
def test_cuda_12_takes_the_device_code(source: str, architecture: str, tmp_path: Path) -> None:
    path = SOURCE_ROOT / source
    ptx, log = nvrtc.compile_to_ptx(path, architecture, include=SOURCE_ROOT)
    assert ptx is not None, log
    assert log == ""
    code, said = nvrtc.assemble(ptx, architecture, tmp_path)
    assert code == 0, said
    rows = parse(said)
    assert rows
    assert {row.architecture for row in rows} == {architecture}
    # Where there are launches, host functions would be counted as the kernels'.
    if architecture in MEASURED and "<<<" not in path.read_text():
        assert not [row for row in rows if row.faulty]
        assert not slow_kernels(said)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("#include <vector>\n__global__ void f() {}", 'cannot open source file "vector"'),
        ("__global__ void f() { throw 1; }", "does not support exception handling"),
        ("__global__ void f(float* x) { x[0] = y; }", 'identifier "y" is undefined'),
    ],
)
def test_what_is_not_for_devices_is_found(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "bad.cu").write_text(text)
    ptx, log = nvrtc.compile_to_ptx(tmp_path / "bad.cu", "80", include=SOURCE_ROOT)
    assert ptx is None
    assert problem in log
