"""qlinear doctor on the driver, GPUs, torch and GPU kernels, with all of them made up."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doctor_harness import Doctor, runner, states, text

from qlinear_service.diagnosis import gpu, gpu_self_test, host
from qlinear_service.diagnosis.gpu_self_test import tested_kinds as real_tested_kinds
from qlinear_service.errors import SelfTestError
from qlinear_service.kernels import cuda_abi, cuda_library
from qlinear_service.kernels.build_cuda import LibraryRecord
from qlinear_service.kernels.driver import Driver, Gpu
from qlinear_service.kernels.ninja import ToolMissing
from qlinear_service.layers import QuantizedLinear

H200 = Gpu(ordinal=0, name="NVIDIA H200", major=9, minor=0, memory_bytes=141 << 30)
ORIN = Gpu(ordinal=1, name="Orin", major=8, minor=7, memory_bytes=8 << 30)
RECORD = LibraryRecord(
    source_hash="",
    architectures=("80", "90a"),
    machine="",
    compiler="nvcc V13.0.88",
    host_compiler="g++",
    seconds=1.0,
)


class Library:
    """The GPU library as far as the doctor asks it."""

    def ql_cuda_architectures(self) -> bytes:
        return b"80 90a"

    def ql_cuda_device_info(self, ordinal: int, info: Any) -> int:
        info.supported = int(ordinal == 0)
        return 0


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    return runner(capsys)


@pytest.fixture(autouse=True)
def with_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with an H200 and an Orin, a torch that sees them, and a library for the former."""
    monkeypatch.setattr(host, "host_findings", lambda config: iter(()))
    monkeypatch.setattr(gpu, "ask_driver", lambda: Driver(cuda_version=(13, 0), gpus=(H200, ORIN)))
    monkeypatch.setattr(gpu, "find_cuda_library", lambda cache, needed: (tmp_path / "lib.so", ""))
    monkeypatch.setattr(gpu, "read_record", lambda path: RECORD)
    monkeypatch.setattr(gpu, "ctypes", SimpleNamespace(CDLL=lambda path: path))
    monkeypatch.setattr(cuda_abi, "declare", lambda library: Library())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_self_test, "tested_kinds", lambda path, ordinal: 16)


def test_a_gpu_with_kernels_is_tested(doctor: Doctor) -> None:
    code, report = doctor("--device", "cuda:0")
    assert code == 0
    assert states(report)["gpu self-test"] == "ok"
    assert text(report, "gpu 0") == "NVIDIA H200, sm_90, 141 GiB"
    assert report["findings"]["gpu 0"]["supported"] is True
    assert states(report)["gpu 1"] == "note", "it is there and not asked for"
    assert report["findings"]["gpu kernels"]["architectures"] == ["80", "90a"]


def test_a_gpu_without_kernels_is_refused_by_name(doctor: Doctor) -> None:
    code, report = doctor("--device", "cuda:1")
    assert code == 1
    assert states(report)["gpu 1"] == "fault"
    assert text(report, "gpu 1").startswith("Orin, sm_87, 8 GiB: there are no kernels for it")
    code, report = doctor("--device", "cuda:2")
    assert code == 1
    assert text(report, "gpu 2") == "cuda:2 is asked for, and the driver shows 2 GPUs"


def test_several_gpus_are_tested_each_and_must_be_of_one_kind(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested: list[int] = []
    monkeypatch.setattr(
        gpu_self_test, "tested_kinds", lambda path, ordinal: tested.append(ordinal) or 16
    )
    code, report = doctor("--devices", "0,1")
    assert code == 1
    assert states(report)["gpu 1"] == states(report)["gpus together"] == "fault"
    assert "expected GPUs of one kind" in text(report, "gpus together")
    assert report["device"] == "cuda:0, cuda:1"
    second = replace(H200, ordinal=1)
    two = Driver(cuda_version=(13, 0), gpus=(H200, second))
    monkeypatch.setattr(gpu, "ask_driver", lambda: two)
    monkeypatch.setattr(Library, "ql_cuda_device_info", supports_all)
    tested.clear()
    code, report = doctor("--devices", "0,1")
    assert code == 0
    assert tested == [0, 1]
    assert "gpus together" not in report["findings"]
    assert text(report, "gpu 1 test") == "cuda:1 agrees with the reference on 16 kinds of layers"
    code, report = doctor("--devices", "0,2")
    assert code == 1
    assert text(report, "gpu 2") == "cuda:2 is asked for, and the driver shows 2 GPUs"


def supports_all(self: Library, ordinal: int, info: Any) -> int:
    info.supported = 1
    return 0


@pytest.mark.parametrize("error", [SelfTestError("off by one"), RuntimeError("out of memory\nat")])
def test_gpu_kernels_that_fail_their_test_are_a_fault(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(path: Path, ordinal: int) -> int:
        raise error

    monkeypatch.setattr(gpu_self_test, "tested_kinds", failing)
    code, report = doctor("--device", "cuda:0")
    assert code == 1
    assert text(report, "gpu self-test") == str(error).partition("\n")[0]


def test_a_driver_that_is_older_than_the_library_is_told_apart(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "ask_driver", lambda: Driver(cuda_version=(12, 8), gpus=(H200,)))
    code, report = doctor("--device", "cuda:0")
    assert code == 1
    found = text(report, "gpu kernels")
    assert "was built with CUDA 13.0, and the driver runs CUDA up to 12.8" in found
    assert "nvcc of CUDA 12 (NVCC names one)" in found
    monkeypatch.setattr(gpu, "ask_driver", lambda: Driver(cuda_version=(13, 0), gpus=(H200,)))
    assert doctor("--device", "cuda:0")[0] == 0


@pytest.mark.parametrize(
    ("cuda", "words"), [(None, "is a build without CUDA"), ("13.0", "finds no driver of CUDA 13.0")]
)
def test_a_torch_that_cannot_use_the_gpu_is_a_fault(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, cuda: str | None, words: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, report = doctor("--device", "cuda:0")
    assert code == 1
    assert words in text(report, "gpu torch")


@pytest.mark.parametrize("tools", [True, False])
def test_gpu_kernels_that_are_not_built_are_a_fault_only_if_they_cannot_be(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tools: bool
) -> None:
    def check() -> str:
        if tools:
            return "nvcc V13"
        raise ToolMissing("no nvcc: install it")

    monkeypatch.setattr(gpu, "find_cuda_library", lambda cache, needed: (None, "not there"))
    monkeypatch.setattr(gpu, "check_tools", check)
    code, report = doctor("--device", "cuda:0")
    assert code == (0 if tools else 1)
    assert states(report)["gpu kernels"] == ("note" if tools else "fault")
    assert ("builds them first" if tools else "not there; no nvcc") in text(report, "gpu kernels")
    assert "gpu self-test" not in report["findings"]


def test_the_library_is_looked_for_with_the_gpus_that_it_can_be_for(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    find = cuda_library.find_cuda_library

    def finding(cache_dir: Path, needed: list[str]) -> tuple[Path | None, str]:
        asked.append(needed)
        return find(cache_dir / "empty", needed)

    monkeypatch.setattr(gpu, "find_cuda_library", finding)
    doctor()
    assert asked == [["90a"]]


def test_gpu_kernels_are_tested_with_sample_layers_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fake:
        """Stands in for CudaKernels: its layers must have been moved."""

        def __init__(self, path: Path, *, device: int) -> None:
            assert (path, device) == (Path("lib.so"), 3)

        def to_device(self, layer: QuantizedLinear) -> str:
            return f"moved {layer.spec.module}"

    def run(kernels: Any, layers: Iterable[str]) -> int:
        assert isinstance(kernels, Fake)
        assert list(layers) == [f"moved layer{number}" for number in range(16)]
        return 48

    monkeypatch.setattr(gpu_self_test, "CudaKernels", Fake)
    monkeypatch.setattr(gpu_self_test, "run_gpu_self_test", run)
    assert real_tested_kinds(Path("lib.so"), 3) == 48
