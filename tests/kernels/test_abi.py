"""The C contract seen from C: bad parameters get a status, never a crash."""

import ctypes
from pathlib import Path

import pytest
import torch
from random_layers import random_layer

from qlinear.v1 import linear_pb2
from qlinear_service.dtypes import DType
from qlinear_service.errors import BuildError
from qlinear_service.kernels import backends, build, packing
from qlinear_service.kernels.abi import CpuBody, GatherParams, LinearParams
from qlinear_service.kernels.backends import CpuKernels


@pytest.fixture(scope="module")
def c_library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build.build_cpu_library(build.default_cache_dir())))


def good_params(buffers: list[torch.Tensor]) -> LinearParams:
    layer = packing.pack(random_layer(n=64, k=128))
    x, y = torch.zeros(2, 128).half(), torch.zeros(2, 64).half()
    buffers += [x, y, layer.qweight, layer.scales]
    return LinearParams(
        x=x.data_ptr(), y=y.data_ptr(), qweight=layer.qweight.data_ptr(),
        scales=layer.scales.data_ptr(), m=2, n=64, k=128, x_row_stride=128, y_row_stride=64,
        group_size=128, bits=4, x_dtype=1, compute_dtype=1, scale_dtype=1, bias_dtype=1,
        y_dtype=1, threads=1, weights_fit=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("m", -1, 1), ("n", -1, 1), ("k", -5, 1), ("x_row_stride", 127, 1),
        ("y_row_stride", 63, 1), ("bits", 3, 2), ("group_size", 48, 3), ("group_size", 0, 3),
        ("x_dtype", 0, 4), ("y_dtype", 9, 4), ("scale_dtype", -1, 4), ("compute_dtype", 7, 4),
        ("x", None, 5), ("y", None, 5), ("qweight", None, 5), ("scales", None, 5),
        ("body", 9, 7), ("body", -1, 7), ("m", 0, 0), ("threads", 0, 0), ("threads", -3, 0),
    ],
)  # fmt: skip
def test_each_bad_parameter_has_its_status(
    c_library: ctypes.CDLL, field: str, value: int | None, status: int
) -> None:
    buffers: list[torch.Tensor] = []
    params = good_params(buffers)
    assert c_library.ql_cpu_linear(ctypes.byref(params)) == 0
    setattr(params, field, value)
    assert c_library.ql_cpu_linear(ctypes.byref(params)) == status
    c_library.ql_status_text.restype = ctypes.c_char_p
    assert c_library.ql_status_text(status)


@pytest.mark.parametrize("body", CpuBody)
@pytest.mark.parametrize("offset", [1, 8, 16, 32, 63])
def test_a_misaligned_qweight_is_refused_by_every_body(
    c_library: ctypes.CDLL, body: CpuBody, offset: int
) -> None:
    buffers: list[torch.Tensor] = []
    params = good_params(buffers)
    params.body = body
    if c_library.ql_cpu_linear(ctypes.byref(params)) == 7:
        pytest.skip(f"this processor has no {body.name}")
    params.qweight += offset
    assert c_library.ql_cpu_linear(ctypes.byref(params)) == 8
    c_library.ql_status_text.restype = ctypes.c_char_p
    assert b"multiple of 64" in c_library.ql_status_text(8)


def test_a_null_params_pointer(c_library: ctypes.CDLL) -> None:
    assert c_library.ql_cpu_linear(None) == 5
    assert c_library.ql_cpu_gather(None) == 5


def test_dtype_numbers_are_one_set() -> None:
    header = (Path(build.SOURCE_ROOT) / "linear_params.h").read_text()
    for dtype in DType:
        assert f"QL_{dtype.name} = {dtype.value}" in header
        assert linear_pb2.DType.Value(f"DTYPE_{dtype.name}") == dtype


def test_struct_mirrors_are_compared_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(GatherParams):
        _fields_ = (("extra", ctypes.c_int64),)

    path = build.build_cpu_library(build.default_cache_dir())
    monkeypatch.setattr(backends, "GatherParams", Longer)
    with pytest.raises(BuildError, match="struct sizes"):
        CpuKernels(path, threads=1)


def test_another_layout_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.build_cpu_library(build.default_cache_dir())
    monkeypatch.setattr(backends.layout, "VERSION", 99)
    with pytest.raises(BuildError, match="layout version"):
        CpuKernels(path, threads=1)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(b"not a library")
    with pytest.raises(BuildError, match="cannot load the CPU kernels"):
        CpuKernels(path, threads=1)
