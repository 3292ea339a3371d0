"""qlinear doctor on packages, cache and CPU kernels: what stops serving ends with 1."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_harness import Doctor, runner, states, text

from qlinear_service import cli
from qlinear_service.diagnosis import gpu, host
from qlinear_service.dtypes import DType
from qlinear_service.errors import BuildError
from qlinear_service.kernels import backends
from qlinear_service.kernels.backends import TorchKernels
from qlinear_service.kernels.driver import Driver
from qlinear_service.layers import QuantizedLinear


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    return runner(capsys)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ask_driver", lambda: Driver(problem="there is no driver"))


def test_a_machine_without_a_gpu_serves_on_its_cpu(
    doctor: Doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = doctor()
    assert (code, report["can_serve"], report["device"]) == (0, True, "cpu")
    assert states(report) == {
        "packages": "ok",
        "cache": "ok",
        "cpu kernels": "ok",
        "cpu self-test": "ok",
        "gpu driver": "note",
        "gpu kernels": states(report)["gpu kernels"],  # whether make cuda has run
        "gpu torch": "ok" if torch.cuda.is_available() else "note",
    }
    assert states(report)["gpu kernels"] != "fault"
    assert report["findings"]["cpu self-test"]["kinds"] == 16
    assert text(report, "cpu kernels").startswith("CPU kernels, ")
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5].strip() for line in lines[:-1]] == list(states(report).values())
    assert lines[-1].endswith(" can serve on cpu")


def test_without_a_gpu_it_cannot_serve_on_one(
    doctor: Doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = doctor("--device", "cuda:0")
    assert (code, report["can_serve"]) == (1, False)
    assert states(report)["gpu driver"] == "fault"
    assert states(report)["cpu self-test"] == "ok"
    assert cli.main(["doctor", "--device", "cuda:0"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert " cannot serve on cuda:0: gpu driver" in last


def test_a_missing_package_is_named_and_nothing_is_imported_that_needs_it(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name in ("torch", "rich"):
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(host, "version", version)
    code, report = doctor()
    assert code == 1
    assert text(report, "packages") == "torch, rich missing: pip install 'qlinear[server]'"
    assert "cpu kernels" not in report["findings"]


def test_a_cache_that_cannot_be_written_is_a_note(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QLINEAR_TORCH_ONLY", "true")  # or kernels would be built anew
    (tmp_path / "file").touch()
    code, report = doctor("--cache-dir", str(tmp_path / "file"))
    assert code == 0
    assert states(report)["cache"] == "note"
    assert "--cache-dir" in text(report, "cache")


def test_without_a_compiler_torch_serves_and_the_note_says_how_to_get_one(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        backends, "load_kernels", lambda **_: TorchKernels(instead="no C++ compiler: install g++")
    )
    code, report = doctor()
    assert code == 0
    assert states(report)["cpu kernels"] == "note"
    assert "install g++" in text(report, "cpu kernels")


@pytest.mark.parametrize(("device", "state"), [("cpu", "fault"), ("cuda:0", "note")])
def test_cpu_kernels_that_do_not_build_are_a_fault_where_they_are_needed(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, device: str, state: str
) -> None:
    def failing(**_: Any) -> None:
        raise BuildError("compiling failed")

    monkeypatch.setattr(backends, "load_kernels", failing)
    code, report = doctor("--device", device)
    assert code == 1, "there is no GPU either"
    assert states(report)["cpu kernels"] == state
    assert text(report, "cpu kernels") == "compiling failed"


def test_kernels_that_compute_wrongly_are_a_fault(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(TorchKernels):
        def linear(
            self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType
        ) -> torch.Tensor:
            return super().linear(layer, x, output_dtype) + 1

    monkeypatch.setattr(backends, "load_kernels", lambda **_: Wrong())
    code, report = doctor()
    assert code == 1
    assert states(report)["cpu self-test"] == "fault"
    assert "disagree with the reference" in text(report, "cpu self-test")
