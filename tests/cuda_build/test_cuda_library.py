"""Which GPU library is loaded: the prebuilt one, the cache's, a new one, or a clear refusal."""

import ctypes
import json
import platform
from pathlib import Path

import pytest
from cuda_tools import SMALL, fake_nvcc, require_nvcc, use_sources, without_nvcc

from qlinear_service.kernels import build, build_cuda, cuda_library, library_cache
from qlinear_service.kernels.ninja import ToolMissing


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One small source instead of all."""
    return use_sources(monkeypatch, tmp_path, SMALL)


@pytest.mark.parametrize("missing", ["nvcc", "g++", "ninja"])
def test_a_missing_tool_is_named_with_how_to_get_it(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    tools = tmp_path / "tools"
    without_nvcc(monkeypatch, tools)
    monkeypatch.setattr(build.sys, "executable", str(tmp_path / "python"))
    if missing != "nvcc":
        fake_nvcc(tools / "nvcc", "13.0")
        (tools / missing).unlink()
    with (
        pytest.raises(ToolMissing) as caught,
        cuda_library.cuda_library(tmp_path / "cache", ["80"]),
    ):
        pass
    how = {
        "nvcc": "pip install 'qlinear[cuda-compiler]'",
        "g++": "apt-get install g++",
        "ninja": "pip install ninja",
    }
    assert str(caught.value).startswith(f"no {'C++ compiler' if missing == 'g++' else missing}")
    assert how[missing] in str(caught.value)
    assert str(cuda_library.PREBUILT) in str(caught.value)
    assert str(caught.value).endswith("until then the CPU serves")


def pretend_prebuilt(architectures: list[str], **changed: str) -> Path:
    """A file that says it was built from these sources."""
    path = cuda_library.PREBUILT
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"as good as built")
    library_cache.seal(path)
    record = {
        "source_hash": build_cuda.source_hash(),
        "architectures": architectures,
        "machine": platform.machine(),
        "compiler": "nvcc V13.0.1",
        "host_compiler": "g++",
        "seconds": 1.0,
    }
    path.with_suffix(".json").write_text(json.dumps(record | changed))
    return path


def test_the_prebuilt_library_needs_no_compiler_and_no_cache(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_nvcc(monkeypatch, tmp_path / "tools")
    prebuilt = pretend_prebuilt(["80", "90a"])
    cache = tmp_path / "cache"
    with cuda_library.cuda_library(cache, ["90a"]) as path:
        assert path == prebuilt
    assert cuda_library.find_cuda_library(cache, ["80", "90a"]) == (prebuilt, "")
    assert not cache.exists()


@pytest.mark.parametrize(
    ("misfit", "words"),
    [
        ("absent", "is not there (make cuda makes it)"),
        ("no record", "is not there (make cuda makes it)"),
        ("source", "was built from other sources"),
        ("machine", "is for riscv64, and this is"),
        ("architecture", "holds code for 80 and not for 86"),
        ("damage", "is damaged"),
    ],
)
def test_a_prebuilt_library_that_does_not_fit_is_passed_over_and_the_error_says_why(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, misfit: str, words: str
) -> None:
    without_nvcc(monkeypatch, tmp_path / "tools")
    prebuilt = pretend_prebuilt(["80"], **({"machine": "riscv64"} if misfit == "machine" else {}))
    if misfit == "absent":
        prebuilt.unlink()
    elif misfit == "no record":
        prebuilt.with_suffix(".json").write_text("{}")
    elif misfit == "source":
        source.write_text(SMALL + "// edited")
    elif misfit == "damage":
        prebuilt.write_bytes(prebuilt.read_bytes()[:-1])
    wanted = ["86"] if misfit == "architecture" else ["80"]
    found, why_not = cuda_library.find_cuda_library(tmp_path, wanted)
    assert found is None
    assert why_not.startswith(f"{prebuilt} {words}")
    with (
        pytest.raises(ToolMissing) as caught,
        cuda_library.cuda_library(tmp_path, wanted),
    ):
        pass
    assert f"{prebuilt} {words}" in str(caught.value)


def test_what_was_built_before_the_compiler_went_is_still_loaded(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_nvcc()
    built = build_cuda.build_cuda_library(tmp_path, ["80", "86"])
    without_nvcc(monkeypatch, tmp_path / "tools")
    with cuda_library.cuda_library(tmp_path, ["86"]) as path:
        assert path == built
    with pytest.raises(ToolMissing), cuda_library.cuda_library(tmp_path, ["90a"]):
        pass


def test_without_a_writable_cache_a_temporary_library_is_loaded(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_nvcc()
    (tmp_path / "file").touch()
    with cuda_library.cuda_library(tmp_path / "file", ["80"]) as path:
        library = ctypes.CDLL(str(path))
    assert not path.exists()
    assert library.ql_run is not None
