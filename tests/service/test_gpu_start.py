"""Which device is chosen and why; layers onto a GPU and its self-test, with all of it made up."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_layers import random_layer

from qlinear_service.config import KernelConfig
from qlinear_service.dtypes import DType
from qlinear_service.errors import ConfigError, OutOfDeviceMemory, SelfTestError
from qlinear_service.gpu import choice, loading, probe, selftest
from qlinear_service.gpu.choice import choose_device
from qlinear_service.gpu.loading import GpuPlace, device_bytes
from qlinear_service.gpu.made_up import made_up_layer
from qlinear_service.gpu.selftest import run_gpu_self_test
from qlinear_service.kernels import reference
from qlinear_service.kernels.backends import TorchKernels
from qlinear_service.kernels.cuda_abi import CudaPlan
from qlinear_service.kernels.driver import Driver, Gpu
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import QuantizedLinear

GIB = 1 << 30
H200 = Gpu(ordinal=0, name="NVIDIA H200", major=9, minor=0, memory_bytes=141 * GIB)
ORIN = Gpu(ordinal=0, name="Orin", major=8, minor=7, memory_bytes=8 * GIB)
NO_DRIVER = Driver(problem="there is no NVIDIA driver")
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what makes up a machine."""

    def make(driver: Driver, *, library: bool = True, torch_can: bool = True) -> None:
        found = (Path("lib.so") if library else None, "it was never built")
        monkeypatch.setattr(choice, "ask_driver", lambda: driver)
        monkeypatch.setattr(choice, "find_cuda_library", lambda cache, names: found)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_can)

    return make


@pytest.mark.parametrize(
    ("driver", "more", "device", "why"),
    [
        (Driver(gpus=(H200,)), {}, "cuda:0", "NVIDIA H200 is there"),
        (NO_DRIVER, {}, "cpu", "there is no NVIDIA driver"),
        (Driver(), {}, "cpu", "the driver shows no GPU"),
        (Driver(gpus=(ORIN,)), {}, "cpu", "Orin is there, but Orin has compute capability 8.7"),
        (Driver(gpus=(H200,)), {"library": False}, "cpu", "never built; --device cuda:0 builds"),
        (Driver(gpus=(H200,)), {"torch_can": False}, "cpu", "a GPU needs a build of torch"),
    ],
)
def test_by_itself_it_takes_a_gpu_that_works(
    machine: Callable[..., None], driver: Driver, more: dict[str, bool], device: str, why: str
) -> None:
    machine(driver, **more)
    found = choose_device(KernelConfig())
    assert found.config.device == device
    assert why in found.why
    assert found.gpu_unused == (device == "cpu" and bool(driver.gpus))
    assert choose_device(KernelConfig(torch_only=True)).config.device == "cpu"


def test_by_itself_it_passes_over_kernels_that_the_driver_cannot_run(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = SimpleNamespace(compiler="nvcc V13.0.88")
    monkeypatch.setattr(choice, "read_record", lambda library: record)
    for newest, device in (((12, 9), "cpu"), ((13, 0), "cuda:0"), ((13, 2), "cuda:0")):
        machine(Driver(cuda_version=newest, gpus=(H200,)))
        found = choose_device(KernelConfig())
        assert found.config.device == device
        assert found.gpu_unused == ("built with CUDA 13.0, and the driver" in found.why)
        assert found.gpu_unused == (device == "cpu")


def test_what_is_asked_for_is_taken_or_refused(machine: Callable[..., None]) -> None:
    machine(Driver(gpus=(H200,)), library=False)
    assert choose_device(KernelConfig(device="cuda:0")).config.device == "cuda:0"
    assert choose_device(KernelConfig(device="cpu")).config.device == "cpu"
    with pytest.raises(ConfigError, match="cuda:3, and the driver shows cuda:0 NVIDIA H200;"):
        choose_device(KernelConfig(device="cuda:3"))
    machine(Driver(gpus=(ORIN,)))
    with pytest.raises(ConfigError, match=r"Orin has compute capability 8\.7, .* sm|no kernels"):
        choose_device(KernelConfig(device="cuda:0"))
    machine(NO_DRIVER)
    with pytest.raises(ConfigError, match="serve with --device cpu"):
        choose_device(KernelConfig(device="cuda:0"))


def test_several_that_are_asked_for_must_be_there_and_of_one_kind(
    machine: Callable[..., None],
) -> None:
    both = (H200, replace(H200, ordinal=1))
    machine(Driver(gpus=both), library=False)
    found = choose_device(KernelConfig(devices="0,1"))
    assert (found.config.device, found.config.devices) == ("cuda:0", "0,1")
    assert choose_device(found.config) == found, "it is asked again where layers are loaded"
    with pytest.raises(ConfigError, match="device is cuda:2, and the driver shows cuda:0 NVIDIA"):
        choose_device(KernelConfig(devices="0,2"))
    machine(Driver(gpus=(*both, replace(H200, ordinal=2, name="NVIDIA H100"))))
    assert choose_device(KernelConfig(devices="1,0")).config.device == "cuda:1"
    text = "devices are cuda:1 NVIDIA H200, cuda:2 NVIDIA H100; expected GPUs of one kind"
    with pytest.raises(ConfigError, match=text):
        choose_device(KernelConfig(devices="1,2"))
    machine(Driver(gpus=(H200, replace(ORIN, ordinal=1))))
    with pytest.raises(ConfigError, match="Orin has compute capability"):
        choose_device(KernelConfig(devices="0,1"))
    machine(NO_DRIVER)
    with pytest.raises(ConfigError, match="there is no NVIDIA driver"):
        choose_device(KernelConfig(devices="0,1"))


def some_layers() -> list[QuantizedLinear]:
    return [
        pack(random_layer(n=72, k=200, bias=True, permuted=True)),
        pack(random_layer(n=72, k=200, bits=8, group_size=-1, symmetric=False)),
    ]


def test_the_bytes_of_a_layer_are_known_from_its_shape() -> None:
    for layer in some_layers():
        most = device_bytes(layer.spec)
        # A bias may be float32; this one is float16.
        assert layer.packed_bytes <= most <= layer.packed_bytes + 2 * layer.spec.n_padded


class Kernels:
    """Puts layers onto a GPU with so many bytes."""

    device = CPU

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def to_device(self, layer: QuantizedLinear) -> QuantizedLinear:
        if layer.packed_bytes > self.left:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        self.left -= layer.packed_bytes
        return layer


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> GpuPlace:
    made = GpuPlace.__new__(GpuPlace)
    made.name, made.kernels = "cuda:0", Kernels(10_000)  # type: ignore[assignment]
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 4 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    made.emptied = emptied  # type: ignore[attr-defined]
    return made


def test_layers_that_cannot_fit_are_refused_before_any_is_read(place: GpuPlace) -> None:
    layer = some_layers()[0]
    place.check_fits([layer.spec])
    many = GIB // device_bytes(layer.spec) + 1
    with pytest.raises(OutOfDeviceMemory, match=r"take 1\.00 GiB on cuda:0 .* 2\.00 of 4\.00 GiB"):
        place.check_fits([layer.spec] * many)


def test_a_layer_that_finds_no_room_is_named_and_nothing_stays(place: GpuPlace) -> None:
    layer = some_layers()[0]

    def fill() -> None:
        with place.filling() as put:
            put(layer)
            put(layer)

    with pytest.raises(OutOfDeviceMemory, match="no room for layer 'test/layer'"):
        fill()
    assert place.emptied  # type: ignore[attr-defined]


class Planned(TorchKernels):
    """Plain torch with plans: a kernel for each of few and many rows, of each dtype and bits."""

    device = CPU

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong
        self.tested: set[str] = set()
        self.library = self

    def ql_cuda_kernel_name(self, kernel: int) -> bytes:
        return f"kernel {kernel}".encode()

    def plan(self, layer: QuantizedLinear, rows: int, x: DType, y: DType) -> CudaPlan:
        return CudaPlan(kernel=100 * layer.spec.bits + 10 * x + (rows > 8), m_tiles=1)

    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        y = reference.linear(layer, x, output_dtype=output_dtype)
        kernel = f"kernel {self.plan(layer, len(x), output_dtype, output_dtype).kernel}"
        self.tested.add(kernel)
        if kernel == self.wrong:
            y[-1, -1] += 100
        return y

    def wait(self) -> None:
        pass


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "SIZES", ((64, 128),))
    monkeypatch.setattr(selftest, "ROWS", (1, 13))


@pytest.mark.usefixtures("small")
def test_every_kernel_is_tested_with_loaded_layers_or_made_up_ones() -> None:
    kernels: Any = Planned()
    assert run_gpu_self_test(kernels, some_layers()[:1]) == 1 + 8
    few = {f"kernel {bits}{dtype}{many}" for bits in (4, 8) for dtype in (1, 2) for many in (0, 1)}
    assert kernels.tested == few | {"kernel 430", "kernel 431"}  # float32 of the loaded layer


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("wrong", ["kernel 410", "kernel 431", "kernel 821"])
def test_a_wrong_kernel_is_named(wrong: str) -> None:
    kernels: Any = Planned(wrong)
    with pytest.raises(SelfTestError, match=f"GPU kernel '{wrong}' .m=1.* disagree"):
        run_gpu_self_test(kernels, some_layers()[:1])


def test_made_up_layers_are_layers_and_sizes_are_six() -> None:
    layer = made_up_layer(
        n=64, k=256, bits=8, group_size=32, symmetric=False, scale_dtype=DType.BF16, device=CPU
    )
    packed = pack(random_layer(n=64, k=256, bits=8, group_size=32, symmetric=False))
    assert layer.qweight.shape == packed.qweight.shape
    assert layer.scales.shape == packed.scales.shape
    assert layer.zeros is not None
    assert packed.zeros is not None
    assert layer.zeros.shape == packed.zeros.shape
    with pytest.raises(ValueError, match="multiples of 64 and 128"):
        made_up_layer(
            n=65, k=256, bits=8, group_size=32, symmetric=True, scale_dtype=DType.F16, device=CPU
        )
    sizes = probe.sizes_to_read()
    assert len(sizes) == 6
    assert (sizes[0], sizes[-1]) == (1 << 20, 1 << 29)


def test_a_gpu_that_is_full_at_start_is_one_sentence(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(Driver(gpus=(H200,)))

    def full(*words: object, **more: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(loading, "cuda_library", lambda *w, **m: contextlib.nullcontext(Path("l")))
    monkeypatch.setattr(loading, "CudaKernels", full)
    with pytest.raises(Exception, match=r"cuda:0 cannot be used: CUDA error: out of memory$"):
        GpuPlace(KernelConfig(device="cuda:0"), threading.Event())


def test_kernels_get_the_tables_of_the_cache_folder(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(Driver(gpus=(H200,)))
    given: dict[str, Any] = {}

    def made(library: Path, **more: Any) -> None:
        given.update(more)
        raise RuntimeError("enough")

    monkeypatch.setattr(loading, "cuda_library", lambda *w, **m: contextlib.nullcontext(Path("l")))
    monkeypatch.setattr(loading, "CudaKernels", made)
    monkeypatch.setattr(loading, "read_tables", lambda cache: [f"of {cache}"])
    with pytest.raises(Exception, match="enough"):
        GpuPlace(KernelConfig(device="cuda:0", cache_dir=tmp_path), threading.Event())
    assert given["tables"] == [f"of {tmp_path}"]


def test_what_tables_say_of_loaded_layers_is_handed_on(place: GpuPlace) -> None:
    layers = some_layers()
    known = SimpleNamespace(tuned_bandwidths=lambda given: [(x.spec.shape, 8, 1.0) for x in given])
    place.kernels.known = known  # type: ignore[assignment]
    assert list(place.tuned_bandwidths(layers)) == [(x.spec.shape, 8, 1.0) for x in layers]
