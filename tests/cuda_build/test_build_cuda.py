"""Building the GPU library: what is compiled, once for each content; which library is loaded."""

import ctypes
import platform
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from cuda_tools import SMALL, require_nvcc, use_sources

from qlinear_service.errors import BuildError
from qlinear_service.kernels import build, build_cuda, build_options, cuda_library
from qlinear_service.kernels.driver import Driver, Gpu
from qlinear_service.kernels.ninja import CompileFailed
from qlinear_service.kernels.nvcc import find_nvcc


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One small source instead of all."""
    return use_sources(monkeypatch, tmp_path, SMALL)


def test_every_file_of_the_folder_is_compiled(source: Path) -> None:
    for name in ("more.cpp", "kernels.cuh", "kernels.h"):
        (source.parent / name).touch()
    assert build_cuda.cuda_sources() == ["cuda/small.cu", "cuda/more.cpp", "status.cpp"]


def test_a_source_may_have_flags_of_its_own(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_nvcc()
    (source.parent / "more.cpp").write_text('extern "C" int ql_own() { return QL_OWN; }')
    hashed = build_cuda.source_hash()
    monkeypatch.setattr(build_cuda, "OWN_FLAGS", {"cuda/more.cpp": ("-DQL_OWN=5",)})
    assert build_cuda.source_hash() != hashed
    library = ctypes.CDLL(str(build_cuda.build_cuda_library(tmp_path, ["80"])))
    assert library.ql_own() == 5


def test_a_library_for_racecheck_is_found_by_no_server(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_nvcc()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_dir = build.default_cache_dir()
    (source.parent / "more.cpp").write_text(
        '#ifdef QL_EVERY_LANE_ARRIVES\nextern "C" int ql_racecheck() { return 1; }\n#endif\n'
    )
    copies = {}
    for flag in ("--racecheck", "--line-info"):
        copies[flag] = tmp_path / f"{flag}.so"
        words = ["--cuda", "--arch", "80", flag, "--output", str(copies[flag])]
        assert build.main(words) == 0
        assert cuda_library.find_cuda_library(cache_dir, ["80"])[0] is None
    assert ctypes.CDLL(str(copies["--racecheck"])).ql_racecheck() == 1
    assert not hasattr(ctypes.CDLL(str(copies["--line-info"])), "ql_racecheck")
    assert all(b".debug_line" in copy.read_bytes() for copy in copies.values())
    plain = build_cuda.build_cuda_library(cache_dir, ["80"])
    assert cuda_library.find_cuda_library(cache_dir, ["80"])[0] == plain
    assert b".debug_line" not in plain.read_bytes()


def test_a_library_holds_what_was_asked_for_and_shows_its_interface_only(
    source: Path, tmp_path: Path
) -> None:
    require_nvcc()
    path = build_cuda.build_cuda_library(tmp_path, ["80", "90"])
    library = ctypes.CDLL(str(path))
    library.ql_cuda_architectures.restype = ctypes.c_char_p
    assert library.ql_cuda_architectures() == b"80 90a"
    assert not hasattr(library, "hidden")
    record = build_cuda.read_record(path)
    assert record is not None
    assert record.architectures == ("80", "90a")
    assert record.source_hash == build_cuda.source_hash()
    assert record.machine == platform.machine()
    assert record.compiler.startswith("nvcc V")
    assert "for 'sm_80'" in build_cuda.compiler_output(path)
    assert "for 'sm_90a'" in build_cuda.compiler_output(path)


def test_it_is_built_once_and_again_after_an_edit_or_for_others(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_nvcc()
    first = build_cuda.build_cuda_library(tmp_path, ["80"])
    stamp = first.stat().st_mtime_ns
    assert build_cuda.build_cuda_library(tmp_path, ["80"]) == first
    assert first.stat().st_mtime_ns == stamp
    assert build_cuda.build_cuda_library(tmp_path, ["86"]) != first
    hashed = build_cuda.source_hash()
    compiler, _ = find_nvcc()
    with monkeypatch.context() as newer:
        newer.setattr(build_cuda, "find_nvcc", lambda: (compiler, "nvcc V99"))
        assert build_cuda.build_cuda_library(tmp_path, ["80"]) != first
        assert build_cuda.source_hash() == hashed, "which compilers are no part of"
    (source.parents[1] / "layout.h").write_text("// edited\n")
    assert build_cuda.source_hash() != hashed
    assert build_cuda.build_cuda_library(tmp_path, ["80"]) != first


@pytest.mark.parametrize("damaged", ["so", "json"])
def test_a_damaged_library_is_built_again(source: Path, tmp_path: Path, damaged: str) -> None:
    require_nvcc()
    path = build_cuda.build_cuda_library(tmp_path, ["80"])
    file = path.with_suffix(f".{damaged}")
    good = file.read_bytes()
    file.write_bytes(good[:100])
    assert build_cuda.build_cuda_library(tmp_path, ["80"]) == path
    assert len(file.read_bytes()) >= len(good) - 8  # seconds may take fewer digits
    assert ctypes.CDLL(str(path)).ql_run is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("__global__ void f(float* x) { int unused; x[0] = 1; }", "never referenced"),
        ("__global__ void f(float* x) { x[0] = y; }", "is undefined"),
        (
            "__global__ void f() {}\nvoid g() { f<<<1, 1>>>(); }",
            "explicit stream argument not provided",
        ),
        ("bool f(unsigned x, int y) { return x < y; }", "[-Werror=sign-compare]"),
    ],
    ids=["warning of nvcc", "error of nvcc", "launch without a stream", "warning of g++"],
)
def test_warnings_are_errors_in_one_line_and_a_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, problem: str
) -> None:
    require_nvcc()
    use_sources(monkeypatch, tmp_path, text)
    with pytest.raises(CompileFailed, match=r"compiling the GPU kernels failed: ") as caught:
        build_cuda.build_cuda_library(tmp_path, ["80"])
    log = tmp_path / "kernels/build-cuda-failed.log"
    assert str(caught.value).endswith(f"; the whole output is in {log}")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in log.parent.iterdir()] == [log.name]


def test_a_build_that_is_stopped_leaves_nothing(source: Path, tmp_path: Path) -> None:
    require_nvcc()
    stop = threading.Event()
    stop.set()
    with (
        pytest.raises(BuildError, match="the GPU kernels was stopped"),
        cuda_library.cuda_library(tmp_path, ["80"], stop=stop),
    ):
        pass
    assert not list((tmp_path / "kernels").iterdir())


def test_a_path_may_hold_any_sign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_nvcc()
    odd = tmp_path / "it's $HOME: a b"
    odd.mkdir()
    use_sources(monkeypatch, odd, SMALL)
    assert build_cuda.build_cuda_library(odd, ["80"]).exists()


def test_the_program_puts_a_library_where_it_is_told(
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    require_nvcc()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build_options, "PREBUILT", cuda_library.PREBUILT)
    assert build.main(["--cuda", "--arch", "80", "--prebuilt"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("GPU kernels for 80, built in ")
    assert said.endswith(f" s: {cuda_library.PREBUILT}\n")
    assert cuda_library.find_cuda_library(tmp_path / "none", ["80"])[0] == cuda_library.PREBUILT
    assert len(list(cuda_library.PREBUILT.parent.iterdir())) == 2
    (tmp_path / "file").touch()
    assert build.main(["--cuda", "--arch", "80", "--output", str(tmp_path / "file/x.so")]) == 1
    assert capsys.readouterr().err.startswith("error: cannot write ")


def test_the_build_of_this_machine_includes_its_gpus_and_goes_on_where_it_cannot(
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    require_nvcc()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_build_cpu", lambda: None)
    old = Gpu(ordinal=0, name="Tesla T4", major=7, minor=5, memory_bytes=1 << 34)
    gpus = (old, replace(old, major=9, minor=0), replace(old, major=8, minor=6))

    def said(*present: Gpu) -> str:
        monkeypatch.setattr(build, "ask_driver", lambda: Driver(gpus=present))
        assert build.main([]) == 0
        return capsys.readouterr().out

    assert said() == said(old) == ""
    built = Path(said(*gpus).removeprefix("GPU kernels: ").rstrip())
    record = build_cuda.read_record(built)
    assert record is not None
    assert record.architectures == ("86", "90a")
    assert said(*gpus) == f"GPU kernels: {built}\n"

    source.write_text("not C++")
    monkeypatch.setenv("NVCC", "none-such")
    note = said(*gpus)
    assert note.startswith("note: no GPU kernels: NVCC is 'none-such'")
    assert note.endswith("note: --device auto will choose the CPU\n")
    monkeypatch.delenv("NVCC")
    assert said(*gpus).startswith("note: no GPU kernels: ")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    source.write_text(SMALL)
    assert said(*gpus).startswith("note: cannot keep GPU kernels in ")
