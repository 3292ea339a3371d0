"""Builds the GPU library from csrc/ with nvcc and ninja, once for each content of its sources.

Machine code for the architectures that are asked for and no PTX (architectures.py says why). What
is loaded, and whether anything has to be built, is decided in cuda_library.py. Knows no torch.
"""

import hashlib
import json
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from qlinear_service.kernels.architectures import ARCHITECTURES, chosen_architectures
from qlinear_service.kernels.library_cache import is_intact, keep, libraries_folder
from qlinear_service.kernels.ninja import (
    SOURCE_ROOT,
    find_compiler,
    find_ninja,
    quoted,
    run_ninja,
    usable_cores,
    version_of,
)
from qlinear_service.kernels.nvcc import find_nvcc, link_folders

__all__ = [
    "RECORD_SUFFIX",
    "WHAT",
    "LibraryRecord",
    "build_cuda_library",
    "check_tools",
    "compiler_output",
    "cuda_sources",
    "read_record",
    "source_hash",
]

OWN_FLAGS: dict[str, tuple[str, ...]] = {}
"""Flags that a source of csrc/ needs beside CUDA_FLAGS."""

# No --use_fast_math: division and denormals stay exact. Warnings are errors, but for those of ptxas
# (spilled registers): another compiler's may not keep a server from starting, so resources.py
# finds them, which `make cuda` runs.
CUDA_FLAGS = (
    "-std=c++17",
    "-O3",
    "--expt-relaxed-constexpr",
    "-Wdefault-stream-launch",
    "-Xcudafe=--promote_warnings",
    "-Xptxas=-v,-warn-spills,-warn-lmem-usage",
    "-Xcompiler=-fPIC,-Wall,-Wextra,-Werror",
)

LINE_INFO = ("-lineinfo",)
"""Flags with which profilers and compute-sanitizer name lines; the code stays the same."""
RACECHECK = (*LINE_INFO, "-DQL_EVERY_LANE_ARRIVES")
"""Flags of a library in which racecheck can follow every order (docs/kernel.md); for no server."""

# Only the interface is visible: another copy of the CUDA runtime in the process stays its own.
EXPORTS = "{ global: ql_*; local: *; };"

WHAT = "the GPU kernels"
RECORD_SUFFIX = ".json"
OUTPUT_SUFFIX = ".txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryRecord:
    """What stands in the JSON file beside a GPU library."""

    source_hash: str
    """Of sources and flags, not of compilers: the machine that runs a library may have none."""
    architectures: tuple[str, ...]
    machine: str
    """The kind of processor, as `uname -m` says it."""
    compiler: str
    host_compiler: str
    seconds: float
    """What building took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Toolchain:
    nvcc: str
    nvcc_version: str
    compiler: str
    compiler_version: str
    ninja: str


def build_cuda_library(
    cache_dir: Path,
    architectures: Sequence[str] = ARCHITECTURES,
    *,
    more_flags: tuple[str, ...] = (),
    stop: threading.Event | None = None,
    keep_log: bool = True,
) -> Path:
    """Return the GPU library for these sources, building it if the cache has no intact one.

    Beside it lie its record and what the compilers said of it, see `read_record` and
    `compiler_output`.

    Args:
        cache_dir: where built libraries are kept; created on demand.
        architectures: what machine code is made for, see `chosen_architectures`.
        more_flags: beside CUDA_FLAGS. A library that has some is never found by a server.
        stop: set when nobody wants the library any more.
        keep_log: keep what the compilers said, where they failed, in the cache.

    Raises:
        ToolMissing: there is no nvcc, no C++ compiler or no ninja.
        BuildError: the compilation failed or was stopped.
        OSError: the cache holds no intact library and cannot be written.
    """
    chosen = chosen_architectures(architectures)
    tools = _find_toolchain()
    sources = source_hash(more_flags)
    folder = libraries_folder(cache_dir)
    cached = folder / f"libqlinear_cuda-{_content_hash(sources, tools, chosen)}.so"
    if read_record(cached) is not None and is_intact(cached):
        return cached
    log = folder / "build-cuda-failed.log" if keep_log else None

    def make(work_dir: Path) -> Path:
        started = time.monotonic()
        lines = _ninja_lines(tools, chosen, more_flags, cached.name)
        (work_dir / "exports.map").write_text(EXPORTS)
        # A name without odd signs: nvcc does not quote all that it hands on.
        (work_dir / "csrc").symlink_to(SOURCE_ROOT)
        jobs = ["-j", str(usable_cores())]
        output = run_ninja(
            lines, work_dir, what=WHAT, ninja=tools.ninja, options=jobs, stop=stop, log=log
        )
        library = work_dir / cached.name
        record = LibraryRecord(
            source_hash=sources,
            architectures=chosen,
            machine=platform.machine(),
            compiler=tools.nvcc_version,
            host_compiler=tools.compiler_version,
            seconds=round(time.monotonic() - started, 1),
        )
        library.with_suffix(RECORD_SUFFIX).write_text(json.dumps(asdict(record), indent=2) + "\n")
        library.with_suffix(OUTPUT_SUFFIX).write_text(output)
        return library

    keep(cached, make, beside=(RECORD_SUFFIX, OUTPUT_SUFFIX))
    return cached


def read_record(library: Path) -> LibraryRecord | None:
    """Return what the file beside a GPU library says of it; None if there is no such file."""
    try:
        found = json.loads(library.with_suffix(RECORD_SUFFIX).read_text())
        return LibraryRecord(**found | {"architectures": tuple(found["architectures"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def compiler_output(library: Path) -> str:
    """Return what the compilers said of a library that the cache holds; "" if that is lost."""
    try:
        return library.with_suffix(OUTPUT_SUFFIX).read_text()
    except OSError:
        return ""


def cuda_sources() -> list[str]:
    """Return every source of the GPU library, relative to csrc/.

    All that lies in csrc/cuda and csrc/dispatch, so that none is forgotten; each is compiled for
    every architecture, and what an architecture lacks is left out in the source.
    """
    own = [path for path in SOURCE_ROOT.glob("cuda/*") if path.suffix in (".cu", ".cpp")]
    # Backwards by name, by which the linear kernels, the longest to compile, are not the last.
    own = sorted(own, reverse=True) + sorted(SOURCE_ROOT.glob("dispatch/*.cpp"))
    return [str(path.relative_to(SOURCE_ROOT)) for path in own] + ["status.cpp"]


def source_hash(more_flags: tuple[str, ...] = ()) -> str:
    """Return the hash of everything that decides what the library does, but for the compilers."""
    flags = CUDA_FLAGS + more_flags
    digest = hashlib.sha256(f"{flags}\0{OWN_FLAGS}\0{EXPORTS}".encode())
    # Every file that a source could include, not a list that somebody forgets to extend.
    folders = [*SOURCE_ROOT.glob("cuda/*.[hc]*"), *SOURCE_ROOT.glob("dispatch/*.[hc]*")]
    for source in sorted([*SOURCE_ROOT.glob("*.[hc]*"), *folders]):
        digest.update(f"\0{source.relative_to(SOURCE_ROOT)}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _content_hash(sources: str, tools: _Toolchain, architectures: tuple[str, ...]) -> str:
    versions = f"{tools.nvcc_version}\0{tools.compiler_version}"
    digest = hashlib.sha256(f"{sources}\0{versions}\0{architectures}".encode())
    return digest.hexdigest()[:16]


def check_tools() -> str:
    """Return the compilers that a library would be built with.

    Raises:
        ToolMissing: there is no nvcc, no C++ compiler or no ninja.
    """
    tools = _find_toolchain()
    return f"{tools.nvcc_version}, {tools.compiler_version}"


def _find_toolchain() -> _Toolchain:
    nvcc, nvcc_version = find_nvcc()
    compiler = find_compiler()
    return _Toolchain(
        nvcc=nvcc,
        nvcc_version=nvcc_version,
        compiler=compiler,
        compiler_version=version_of(compiler).partition("\n")[0],
        ninja=find_ninja(),
    )


def _ninja_lines(
    tools: _Toolchain, architectures: tuple[str, ...], more_flags: tuple[str, ...], name: str
) -> list[str]:
    codes = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in architectures]
    told = f'-DQL_CUDA_ARCHITECTURES="{" ".join(architectures)}"'
    compile_words = [*CUDA_FLAGS, *more_flags, *codes, told, "-Icsrc"]
    folders = [f"-L{folder}" for folder in link_folders(tools.nvcc)]
    link_words = ["-shared", "-cudart=static", "-Xlinker=--version-script=exports.map", *folders]
    nvcc = f"{quoted(tools.nvcc)} -ccbin {quoted(tools.compiler)}"
    objects = []
    lines = [
        f"flags = {' '.join(map(quoted, compile_words))}",
        "rule compile",
        f"  command = {nvcc} $flags -c $in -o $out",
        "rule link",
        f"  command = {nvcc} {' '.join(map(quoted, link_words))} $in -o $out",
    ]
    for source in cuda_sources():
        objects.append(f"{source.replace('/', '-')}.o")
        lines.append(f"build {objects[-1]}: compile csrc/{source}")
        lines.append(f"  flags = $flags {' '.join(map(quoted, OWN_FLAGS.get(source, ())))}")
    lines.append(f"build {name}: link {' '.join(objects)}")
    return lines
