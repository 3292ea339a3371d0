"""Log lines split into their keys again, whatever a model is called; unwanted kernels are seen."""

import logging
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_lines import split
from packed_files import layers_of_every_kind, write_layers

from qlinear_service import loading
from qlinear_service.config import KernelConfig
from qlinear_service.kernels.backends import TorchKernels
from qlinear_service.log_values import quoted


@given(st.text(), st.text())
def test_any_two_values_come_back(one: str, other: str) -> None:
    line = f"one={quoted(one)} other={quoted(other)}"
    assert split(line) == {"one": one, "other": other}
    assert line.isascii()
    assert line.isprintable()


def test_plain_values_stay_as_they_are() -> None:
    assert quoted("llama-3.1_8B") == "llama-3.1_8B"
    assert quoted(Path("/models/a")) == "/models/a"
    assert quoted("my model") == '"my model"'


@pytest.mark.parametrize("torch_only", [True, False])
def test_kernels_that_nobody_asked_for_are_a_warning(
    torch_only: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def without_compiler(*, torch_only: bool, **more: object) -> TorchKernels:
        return TorchKernels() if torch_only else TorchKernels(instead="no C++ compiler: get one")

    monkeypatch.setattr(loading, "load_kernels", without_compiler)
    path = write_layers(tmp_path / "x.safetensors", layers_of_every_kind()[:1])
    with caplog.at_level(logging.INFO):
        loading.load(path, KernelConfig(torch_only=torch_only), threading.Event())
    record = next(r for r in caplog.records if r.getMessage().startswith("kernels "))
    assert record.levelno == (logging.INFO if torch_only else logging.WARNING)
    description = split(record.getMessage())["description"]
    assert description.endswith("no C++ compiler: get one") == (not torch_only)


def test_a_model_with_blanks_in_its_name_is_quoted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_layers(tmp_path / "x.safetensors", layers_of_every_kind()[:1])
    source = loading.models.open_model(path)
    source.name = "my modèle"
    monkeypatch.setattr(loading.models, "discover", lambda path, plain: [source])
    with caplog.at_level(logging.INFO):
        loading.load(path, KernelConfig(torch_only=True), threading.Event())
    line = next(r.getMessage() for r in caplog.records if r.getMessage().startswith("loaded "))
    assert split(line)["model"] == "my modèle"
