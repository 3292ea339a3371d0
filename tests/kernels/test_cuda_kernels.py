"""CudaKernels above the contract: what it hands over, what it refuses, and what errors become.

Over a library without a GPU; the real one is tested in tests/gpu.
"""

import contextlib
import ctypes
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from closeness import assert_close
from fake_cuda import HostCuda, HostEvent, HostKernels, HostStream, build_fake, pretend
from random_layers import random_layer

from qlinear_service.dtypes import DType
from qlinear_service.errors import BuildError
from qlinear_service.kernels import cuda_abi, packing, reference
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda import DeviceLost
from qlinear_service.kernels.cuda_abi import CudaFlag, CudaLaunch
from qlinear_service.layers import QuantizedLinear


@pytest.fixture(scope="module")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def fake(library_path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path))
    library.fake_launches.restype = library.fake_gathers.restype = ctypes.c_int64
    library.fake_reset()
    return library


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostCuda:
    return pretend(monkeypatch)


@pytest.fixture
def kernels(fake: ctypes.CDLL, host: HostCuda, library_path: Path) -> HostKernels:
    return HostKernels(library_path, spare_workspaces=1)


def last_launch(fake: ctypes.CDLL) -> CudaLaunch:
    launch = CudaLaunch()
    fake.fake_last_launch(ctypes.byref(launch))
    return launch


def last_params(fake: ctypes.CDLL) -> LinearParams:
    params = LinearParams()
    fake.fake_last_params(ctypes.byref(params))
    return params


def small_layer(**form: object) -> QuantizedLinear:
    return packing.pack(random_layer(n=70, k=200, **form))  # type: ignore[arg-type]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_part_of_a_layer_reaches_the_library(
    kernels: HostKernels, bits: int, symmetric: bool
) -> None:
    for x_dtype, y_dtype, scale_dtype in ((torch.float16, 2, 3), (torch.float32, 1, 2)):
        layer = random_layer(
            n=70, k=200, bits=bits, group_size=32, symmetric=symmetric, bias=True, permuted=True,
            scale_dtype=DType(scale_dtype),
        )  # fmt: skip
        assert_close(kernels, layer, torch.randn(5, 200).to(x_dtype), DType(y_dtype))


def test_rows_that_are_apart_overlap_or_stand_alone(
    kernels: HostKernels, fake: ctypes.CDLL
) -> None:
    layer = small_layer()
    wide = torch.randn(9, 300).half()
    y = kernels.linear(layer, wide[::2, 7:207], DType.F32)
    assert (last_params(fake).x_row_stride, last_params(fake).y_row_stride) == (600, 70)
    assert torch.equal(y, kernels.linear(layer, wide[::2, 7:207].contiguous(), DType.F32))
    # A row that is said to lie on top of the next one would be read far beyond its end.
    expanded = wide[:1, :200].expand(4, 200)
    assert torch.equal(
        kernels.linear(layer, expanded, DType.F32),
        kernels.linear(layer, expanded.contiguous(), DType.F32),
    )
    assert last_params(fake).x_row_stride == 200
    with pytest.raises(ValueError, match="contiguous"):
        kernels.linear(layer, torch.randn(200, 4).half().T, DType.F32)
    with pytest.raises(ValueError, match=r"x is \[2, 199\] on cpu; expected \[m, 200\]"):
        kernels.linear(layer, wide[:2, :199], DType.F32)
    with pytest.raises(ValueError, match=r"dtype is torch.float64; expected float16"):
        kernels.linear(layer, wide[:2, :200].double(), DType.F32)


def test_the_result_goes_where_it_is_asked_to_go(kernels: HostKernels, fake: ctypes.CDLL) -> None:
    layer, x = small_layer(), torch.randn(3, 200).half()
    room = torch.full((3, 100), 7.0)
    y = kernels.linear(layer, x, DType.F32, out=room[:, 20:90])
    assert y.data_ptr() == room[:, 20:90].data_ptr()
    assert last_params(fake).y_row_stride == 100
    assert torch.equal(y, kernels.linear(layer, x, DType.F32))
    assert (room[:, :20] == 7).all()
    assert (room[:, 90:] == 7).all()
    overlapping = room.as_strided((3, 70), (60, 1))
    for wrong in (
        room[:, :69], room[:2, :70], room[:, :70].half(), torch.empty(70, 3).T, overlapping,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="out"):
            kernels.linear(layer, x, DType.F32, out=wrong)


def test_no_rows_launch_nothing(kernels: HostKernels, fake: ctypes.CDLL) -> None:
    y = kernels.linear(small_layer(), torch.empty(0, 200).half(), DType.BF16)
    assert (y.shape, y.dtype) == ((0, 70), torch.bfloat16)
    assert fake.fake_launches() == 0


def test_each_stream_has_a_zeroed_workspace_of_its_own(
    kernels: HostKernels, fake: ctypes.CDLL
) -> None:
    layer, x = small_layer(), torch.randn(3, 200).half()
    workspaces = {}
    for stream in (None, HostStream(), HostStream(), None):
        kernels.linear(layer, x, DType.F32, stream=stream)
        launch = last_launch(fake)
        assert stream is None or launch.stream == stream.cuda_stream
        assert not any(ctypes.string_at(launch.workspace, launch.workspace_bytes))
        assert workspaces.setdefault(launch.stream, launch.workspace) == launch.workspace
    assert len(workspaces) == len(set(workspaces.values())) == 3


def test_what_is_allocated_belongs_to_the_stream_that_uses_it(
    kernels: HostKernels, host: HostCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or torch would hand the memory to others while the launch still writes there."""
    current: list[object] = []
    empty = torch.empty

    def noted(*shape: object, **form: object) -> torch.Tensor:
        current.append(host.current_stream(None))
        return empty(*shape, **form)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", noted)
    stream = HostStream()
    kernels.linear(small_layer(permuted=True), torch.ones(3, 200).half(), DType.F32, stream=stream)
    assert len(current) >= 2  # y, and x in the layer's order
    assert set(current) == {stream}


def test_a_capture_takes_a_spare_workspace_or_says_how_to_get_one(
    kernels: HostKernels, host: HostCuda
) -> None:
    layer, x = small_layer(), torch.randn(3, 200).half()
    host.capturing = True
    kernels.linear(layer, x, DType.F32, stream=HostStream())
    stream = HostStream()
    with pytest.raises(RuntimeError, match=r"linear m=3 .* call prepare\(stream\) before"):
        kernels.linear(layer, x, DType.F32, stream=stream)
    host.capturing = False
    kernels.prepare(stream)
    host.capturing = True
    kernels.linear(layer, x, DType.F32, stream=stream)


def test_flags_and_events_reach_the_library(
    fake: ctypes.CDLL, host: HostCuda, library_path: Path
) -> None:
    layer, x = small_layer(), torch.randn(3, 200).half()
    kernels = HostKernels(library_path, batch_invariant=True, dependent=True)
    assert "batch-invariant" in kernels.description
    assert "Fake H200 (sm_90), 132 multiprocessors, built with CUDA 13.0" in kernels.description
    events = (HostEvent(), HostEvent())
    kernels.linear(layer, x, DType.F32, events=events)
    launch = last_launch(fake)
    assert launch.flags == CudaFlag.BATCH_INVARIANT | CudaFlag.DEPENDENT
    assert launch.start_event == events[0].cuda_event != 0
    assert launch.stop_event == events[1].cuda_event != 0
    kernels.linear(layer, x, DType.F32)
    assert last_launch(fake).start_event is None


def test_a_failed_launch_is_an_error_of_that_call(kernels: HostKernels, fake: ctypes.CDLL) -> None:
    layer, x = small_layer(), torch.randn(3, 200).half()
    kernels.linear(layer, x, DType.F32)
    launch = last_launch(fake)
    ctypes.memset(launch.workspace, 1, 8)  # counters that an aborted launch left behind
    fake.fake_fail(1)
    text = r"linear m=3 k200_n70_b4_g128 on cpu: linear: pretended failure \(status 13\)"
    with pytest.raises(RuntimeError, match=text) as caught:
        kernels.linear(layer, x, DType.F32)
    assert not isinstance(caught.value, DeviceLost)
    assert not any(ctypes.string_at(launch.workspace, launch.workspace_bytes))
    kernels.linear(layer, x, DType.F32)
    permuted = small_layer(permuted=True)
    fake.fake_fail(1)
    with pytest.raises(RuntimeError, match="gather m=3 k=200 on cpu: gather: pretended"):
        kernels.linear(permuted, x, DType.F32)


def test_a_lost_device_is_told_apart(kernels: HostKernels, fake: ctypes.CDLL) -> None:
    layer, x = small_layer(), torch.randn(3, 200).half()
    assert not kernels.runtime.is_lost()
    fake.fake_lose()
    with pytest.raises(DeviceLost, match="linear m=3 k200_n70_b4_g128 on cpu"):
        kernels.linear(layer, x, DType.F32)
    stream = HostStream()
    stream.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceLost, match="illegal memory access"):
        kernels.wait(stream)
    fake.fake_reset()
    with pytest.raises(RuntimeError, match="illegal") as caught:
        kernels.wait(stream)
    assert not isinstance(caught.value, DeviceLost)


def test_no_memory_is_an_error_of_that_call(
    kernels: HostKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*shape: object, **form: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(RuntimeError, match=r"linear m=3 .*allocating \[3, 70\].*out of memory"):
        kernels.linear(small_layer(), torch.ones(3, 200).half(), DType.F32)


def test_a_layer_elsewhere_is_refused(kernels: HostKernels) -> None:
    layer = small_layer()
    elsewhere = torch.device("meta")
    kernels.device = elsewhere
    with pytest.raises(ValueError, match=r"layer 'test/layer' is on cpu; move it with to_device"):
        kernels.linear(layer, torch.ones(3, 200).half(), DType.F32)
    moved = kernels.to_device(small_layer(symmetric=False, bias=True, permuted=True))
    for tensor in (moved.qweight, moved.scales, moved.zeros, moved.bias, moved.k_permutation):
        assert tensor is not None
        assert tensor.device == elsewhere


@pytest.mark.parametrize("bits", [4, 8])
def test_path_rows_take_every_kernel(kernels: HostKernels, bits: int) -> None:
    layer = packing.pack(random_layer(n=256, k=256, bits=bits))
    taken = {kernels.plan(layer, m, DType.F16, DType.F16).kernel for m in kernels.path_rows(bits)}
    assert taken == {4 * (bits == 8) + form for form in range(4)}
    # Ragged, so that ends of tiles are met.
    assert any(rows % 8 for rows in kernels.path_rows(bits))


def test_dequantize_and_gather(kernels: HostKernels) -> None:
    logical = random_layer(n=70, k=200, symmetric=False)
    weights = reference.dequantize(logical)
    layer = packing.pack(logical)
    assert torch.equal(kernels.dequantize(layer, DType.F32), weights)
    assert torch.equal(kernels.dequantize(layer, DType.F32, begin=16, end=50), weights[16:50])
    x, order = torch.randn(4, 200).half(), torch.randperm(200).int()
    assert torch.equal(kernels.gather(x, order), x[:, order.long()])


def test_a_gpu_that_cannot_be_served_is_refused_by_name(
    fake: ctypes.CDLL, host: HostCuda, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError, match=r"CUDA device 3 .* the driver shows 1; .* --device cpu"):
        HostKernels(library_path, device=3)
    monkeypatch.setattr(HostCuda, "is_available", lambda self: False)
    with pytest.raises(BuildError, match=r"cannot use Fake H200 \(sm_90\): install a build"):
        HostKernels(library_path)
    fake.fake_supported(0)
    text = r"Fake H200 \(sm_90\) is not supported: .* machine code for sm_80, sm_90a; serve"
    with pytest.raises(BuildError, match=text):
        HostKernels(library_path)
    fake.fake_reset()
    fake.fake_lose()
    monkeypatch.undo()
    with contextlib.ExitStack() as stack:
        pretend(stack.enter_context(pytest.MonkeyPatch.context()))
        with pytest.raises(BuildError, match="cannot run an empty kernel: empty kernel: pretended"):
            HostKernels(library_path)


def test_a_library_that_does_not_fit_is_refused(
    library_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lib.so").write_bytes(b"not a library")
    with pytest.raises(BuildError, match="cannot load the CUDA kernels"):
        HostKernels(tmp_path / "lib.so")
    monkeypatch.setattr(cuda_abi.layout, "VERSION", 99)
    with pytest.raises(BuildError, match=r"struct sizes .* expected \(99, "):
        HostKernels(library_path)
