"""Building the kernel library: once, again after an edit or damage, and where it cannot be done."""

import ctypes
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from qlinear_service.kernels import backends, build
from qlinear_service.kernels.backends import load_kernels


@pytest.fixture
def quick_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small source instead of all."""
    monkeypatch.setattr(build, "CPU_SOURCES", {"status.cpp": ()})


@pytest.mark.parametrize("missing", ["g++", "ninja"])
def test_without_a_tool_the_torch_path_is_taken_and_says_which(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = shutil.which("g++")
    assert compiler is not None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler" if missing == "g++" else compiler)
    monkeypatch.setattr(build.sys, "executable", str(tmp_path / "python"))
    kernels = load_kernels(cache_dir=tmp_path, threads=1)
    assert kernels.name == "torch"
    assert {"g++": "install g++", "ninja": "pip install ninja"}[missing] in kernels.description
    wanted = load_kernels(cache_dir=tmp_path, threads=1, torch_only=True)
    assert "install" not in wanted.description


def test_a_source_that_does_not_compile_is_one_line_and_a_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "CPU_SOURCES", {"status.cpp": ("-DQL_OK=0",)})
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    with pytest.raises(build.BuildError, match=r"the CPU kernels failed: \S+: error: ") as caught:
        load_kernels(cache_dir=tmp_path, threads=1)
    log = tmp_path / "kernels/build-failed.log"
    assert str(caught.value).endswith(f"; the whole output is in {log}")
    assert "\n" not in str(caught.value)
    assert "error: " in log.read_text()
    assert [path.name for path in log.parent.iterdir()] == [log.name]


@pytest.mark.usefixtures("quick_build")
def test_the_library_is_built_once_and_again_after_an_edit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = build.build_cpu_library(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build.build_cpu_library(tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    monkeypatch.setattr(build, "CPU_FLAGS", (*build.CPU_FLAGS, "-DEDITED"))
    assert build.build_cpu_library(tmp_path) != first


def test_a_path_may_hold_any_sign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # One that finds its headers by the folder that is named to the compiler.
    monkeypatch.setattr(build, "CPU_SOURCES", {"cpu/gather.cpp": ()})
    odd = tmp_path / "it's $HOME: a b"
    shutil.copytree(build.SOURCE_ROOT, odd / "csrc")
    monkeypatch.setattr(build, "SOURCE_ROOT", odd / "csrc")
    assert build.build_cpu_library(odd / "cache").exists()


@pytest.mark.usefixtures("quick_build")
def test_the_packages_own_library_needs_no_compiler_and_is_of_these_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "package/prebuilt/libqlinear_cuda.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build.main(["--cpu"]) == 0
    prebuilt = build.prebuilt_cpu_library()
    assert capsys.readouterr().out == f"CPU kernels: {prebuilt}\n"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.sys, "executable", str(tmp_path / "python"))
    assert build.build_cpu_library(tmp_path / "absent") == prebuilt

    content = prebuilt.read_bytes()
    prebuilt.write_bytes(content[:-1])  # damaged: never loaded
    with pytest.raises(build.ToolMissing):
        build.build_cpu_library(tmp_path / "absent")
    prebuilt.write_bytes(content)
    # Loaded only now: writing into a loaded library kills the process, at the latest at its exit.
    assert ctypes.CDLL(str(prebuilt)).ql_layout_version() == 1
    monkeypatch.setattr(build, "CPU_FLAGS", (*build.CPU_FLAGS, "-DEDITED"))
    with pytest.raises(build.ToolMissing):
        build.build_cpu_library(tmp_path / "absent")


@pytest.mark.usefixtures("quick_build")
@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped"])
def test_a_damaged_library_is_built_again(damage: str, tmp_path: Path) -> None:
    path = build.build_cpu_library(tmp_path)
    good = path.read_bytes()
    bad = {
        "empty": b"",
        "truncated": good[:5000],
        "flipped": good[:3000] + bytes([good[3000] ^ 1]) + good[3001:],
    }[damage]
    path.write_bytes(bad)
    assert build.build_cpu_library(tmp_path) == path
    assert path.read_bytes() != bad
    assert ctypes.CDLL(str(path)).ql_layout_version() == 1


@pytest.mark.usefixtures("quick_build")
def test_without_a_writable_cache_nothing_stays_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    loaded: list[ctypes.CDLL] = []

    class Loading:
        def __init__(self, path: Path, **more: object) -> None:
            loaded.append(ctypes.CDLL(str(path)))

    monkeypatch.setattr(backends, "CpuKernels", Loading)
    load_kernels(cache_dir=tmp_path / "file", threads=1)
    assert not list(temporary.iterdir())
    assert loaded[0].ql_layout_version() == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(build.BuildError, match="folder that can be written with --cache-dir"):
        load_kernels(cache_dir=tmp_path / "file", threads=1)


@pytest.mark.usefixtures("quick_build")
def test_left_overs_of_killed_builds_go_and_running_builds_stay(tmp_path: Path) -> None:
    killed, running = tmp_path / "kernels/build-old", tmp_path / "kernels/build-new"
    for folder in (killed, running):
        folder.mkdir(parents=True)
        (folder / "linear.o").touch()
    os.utime(killed, (0, 0))
    path = build.build_cpu_library(tmp_path)
    assert sorted(path.parent.iterdir()) == sorted([running, path])


def test_a_build_that_is_stopped_ends_its_compilers(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(build.BuildError, match="was stopped"):
        load_kernels(cache_dir=tmp_path, threads=1, stop=stop)
    assert not list((tmp_path / "kernels").iterdir())
    words = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [word for word in words if bytes(tmp_path / "kernels") in word]


@pytest.mark.usefixtures("quick_build")
def test_the_bytes_are_on_the_disk_before_the_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps: list[str] = []
    sync, replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        steps.append(Path(f"/proc/self/fd/{descriptor}").readlink().suffix)
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", renamed)
    build.build_cpu_library(tmp_path)
    assert steps == [".so", "rename", ""]
