"""Building the kernel library: once, again after an edit, and what happens without a compiler."""

from pathlib import Path

import pytest

from qlinear_service.kernels import build
from qlinear_service.kernels.library import load_kernels


def test_without_a_compiler_the_torch_path_is_taken_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernels = load_kernels(cache_dir=tmp_path, threads=1)
    assert kernels.name == "torch"
    assert "install g++" in kernels.description


def test_a_source_that_does_not_compile_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "CPU_SOURCES", {"cpu/status.cpp": ("-DQL_OK=0",)})
    with pytest.raises(build.BuildError, match=r"compiling the CPU kernels failed:(.|\n)*error"):
        load_kernels(cache_dir=tmp_path, threads=1)
    assert not list(tmp_path.rglob("*.so"))


def test_the_library_is_built_once_and_again_after_an_edit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "CPU_SOURCES", {"cpu/status.cpp": ()})
    first = build.build_cpu_library(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build.build_cpu_library(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    monkeypatch.setattr(build, "CPU_FLAGS", (*build.CPU_FLAGS, "-DEDITED"))
    assert build.build_cpu_library(tmp_path) != first
