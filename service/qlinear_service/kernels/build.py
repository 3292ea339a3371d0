"""Builds the CPU library from csrc/ with ninja, once for each content of its sources.

The file name carries a hash of every source, the flags and the compiler's version, so an edit or
another compiler builds anew and nothing stale is ever loaded; one in the package, as images have
it, needs no compiler. `make setup` runs this module; the server runs the same code at start. Where
GPUs of ours are, the GPU library is built too, for them alone; --cuda builds just that one.
"""

import argparse
import contextlib
import hashlib
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from qlinear_service.errors import BuildError
from qlinear_service.kernels.architectures import (
    ARCHITECTURES,
    architecture_of,
    chosen_architectures,
)
from qlinear_service.kernels.build_cuda import RECORD_SUFFIX, build_cuda_library, read_record
from qlinear_service.kernels.build_options import parser
from qlinear_service.kernels.cuda_library import PREBUILT, find_cuda_library
from qlinear_service.kernels.driver import ask_driver
from qlinear_service.kernels.library_cache import (
    default_cache_dir,
    is_intact,
    keep,
    kept_or_temporary,
    libraries_folder,
)
from qlinear_service.kernels.ninja import (
    SOURCE_ROOT,
    ToolMissing,
    escape,
    find_compiler,
    find_ninja,
    quoted,
    run_ninja,
    version_of,
)
from qlinear_service.publish import publish_copy

__all__ = [
    "CPU_SOURCES",
    "SOURCE_ROOT",
    "ToolMissing",
    "build_cpu_library",
    "cpu_library",
    "default_cache_dir",
    "main",
    "prebuilt_cpu_library",
]

AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
# g++ 12 warns of uninitialized variables inside its own AVX-512 headers (GCC bug 105593).
AVX512_FLAGS = (
    *AVX2_FLAGS,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)

CPU_SOURCES: dict[str, tuple[str, ...]] = {
    "cpu/linear.cpp": (),
    "cpu/gather.cpp": (),
    "cpu/pack_codes.cpp": (),
    "cpu/read_probe.cpp": (),
    "status.cpp": (),
    "cpu/dequantize.cpp": (),
    "cuda/plan.cpp": (),  # the planner of the GPU kernels: `qlinear plan` needs no GPU
    "cuda/plan_chain.cpp": (),
    "cuda/plan_entries.cpp": (),
    "cuda/plan_fed.cpp": (),
    "cpu/body_plain.cpp": (),
    "cpu/body_avx2.cpp": AVX2_FLAGS,
    "cpu/body_avx512.cpp": AVX512_FLAGS,
    "cpu/body_avx512_bf16.cpp": (*AVX512_FLAGS, "-mavx512bf16"),
}
"""Every source of the CPU library with the flags of its instruction set. The library asks the
processor before it calls a body, so one build serves all x86-64 machines."""

# No -ffast-math: sums keep their order and NaN stays NaN.
CPU_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Toolchain:
    compiler: str
    version: str
    ninja: str


@contextlib.contextmanager
def cpu_library(cache_dir: Path, *, stop: threading.Event | None = None) -> Iterator[Path]:
    """Yield the CPU library for as long as it takes to load it; without a cache a temporary one.

    Raises:
        ToolMissing: there is no C++ compiler or no ninja.
        BuildError: the compilation failed or was stopped, or no folder can be written.
    """

    def build(folder: Path, keep_log: bool) -> Path:
        return build_cpu_library(folder, stop=stop, keep_log=keep_log)

    with kept_or_temporary(cache_dir, build, what="the CPU kernels") as library:
        yield library


def build_cpu_library(
    cache_dir: Path, *, stop: threading.Event | None = None, keep_log: bool = True
) -> Path:
    """Return the CPU library for these sources: the package's, the cache's, or a new one.

    Args:
        cache_dir: where built libraries are kept; created on demand.
        stop: set when nobody wants the library any more.
        keep_log: keep what the compiler said, where it failed, in the cache.

    Raises:
        ToolMissing: there is no C++ compiler or no ninja.
        BuildError: the compilation failed or was stopped.
        OSError: the cache holds no intact library and cannot be written.
    """
    prebuilt = prebuilt_cpu_library()
    if is_intact(prebuilt):
        return prebuilt
    tools = _find_toolchain()
    folder = libraries_folder(cache_dir)
    cached = folder / f"libqlinear_cpu-{_content_hash(tools.version)}.so"
    if is_intact(cached):
        return cached
    log = folder / "build-failed.log" if keep_log else None

    def make(work_dir: Path) -> Path:
        lines = _ninja_lines(tools, cached.name)
        run_ninja(lines, work_dir, what="the CPU kernels", ninja=tools.ninja, stop=stop, log=log)
        return work_dir / cached.name

    keep(cached, make)
    return cached


def prebuilt_cpu_library() -> Path:
    """Return where the package has the CPU library for these sources, if it has one."""
    return PREBUILT.parent / f"libqlinear_cpu-{_content_hash('prebuilt')}.so"


def _find_toolchain() -> _Toolchain:
    compiler, ninja = find_compiler(), find_ninja()
    version = version_of(compiler).partition("\n")[0]
    return _Toolchain(compiler=compiler, version=version, ninja=ninja)


def _content_hash(compiler: str) -> str:
    digest = hashlib.sha256()
    digest.update(f"{compiler}\0{CPU_FLAGS}\0{_cpu_sources()}".encode())
    # Every file that a source could include, not a list that somebody forgets to extend.
    planner = [*SOURCE_ROOT.glob("cuda/*.h"), *SOURCE_ROOT.glob("cuda/plan*.cpp")]
    for source in sorted([*SOURCE_ROOT.glob("*.[hc]*"), *SOURCE_ROOT.glob("cpu/*"), *planner]):
        digest.update(f"\0{source.name}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_sources() -> dict[str, tuple[str, ...]]:
    """Return the sources for this machine: bodies of x86 are left out elsewhere."""
    if platform.machine() in ("x86_64", "AMD64"):
        return CPU_SOURCES
    return {source: flags for source, flags in CPU_SOURCES.items() if not flags}


def _ninja_lines(tools: _Toolchain, name: str) -> list[str]:
    objects = []
    lines = [
        f"flags = {' '.join(CPU_FLAGS)} -I{quoted(SOURCE_ROOT)}",
        "rule compile",
        f"  command = {quoted(tools.compiler)} $flags -c $in -o $out",
        "rule link",
        f"  command = {quoted(tools.compiler)} -shared -fopenmp $in -o $out",
    ]
    for source, flags in _cpu_sources().items():
        objects.append(f"{Path(source).stem}.o")
        lines.append(f"build {objects[-1]}: compile {escape(SOURCE_ROOT / source)}")
        lines.append(f"  flags = $flags {' '.join(flags)}")
    lines.append(f"build {name}: link {' '.join(objects)}")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Build what this machine can use, or with --cuda the GPU library; return the exit code.

    Without --cuda, what the server can do without is a note and not a failure.
    """
    args = parser().parse_args(words)
    # So that SIGTERM, too, ends the compilers and removes their folder.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if args.cpu:
            return _prebuild_cpu()
        return _build_cuda(args) if args.cuda else _build_for_this_machine()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # what shells report for a program that Ctrl-C ended


def _build_for_this_machine() -> int:
    _build_cpu()
    driver = ask_driver()
    found = [architecture_of(gpu.major, gpu.minor) for gpu in driver.gpus]
    wanted = [name for name in ARCHITECTURES if name in found]
    if wanted:
        _build_for_gpus(wanted)
    return 0


def _build_for_gpus(wanted: Sequence[str]) -> None:
    cache_dir = default_cache_dir()
    try:
        library, _ = find_cuda_library(cache_dir, wanted)
        print(f"GPU kernels: {library or build_cuda_library(cache_dir, wanted)}")
    except BuildError as error:
        print(f"note: no GPU kernels: {error}\nnote: --device auto will choose the CPU")
    except OSError as error:
        print(f"note: cannot keep GPU kernels in {cache_dir}: {error.strerror}")
        print("note: --device auto will choose the CPU; --device cuda:0 builds them at each start")


def _build_cpu() -> None:
    try:
        print(f"CPU kernels: {build_cpu_library(default_cache_dir())}")
    except ToolMissing as error:
        print(f"note: {error}\nnote: the server will run on plain torch instead")
    except OSError as error:
        print(f"note: cannot keep CPU kernels in {default_cache_dir()}: {error.strerror}")
        print("note: the server will build them at each start; --cache-dir names another folder")


def _prebuild_cpu() -> int:
    prebuilt = prebuilt_cpu_library()
    if not is_intact(prebuilt):
        publish_copy(build_cpu_library(default_cache_dir()), prebuilt)
    print(f"CPU kernels: {prebuilt}")
    return 0


def _build_cuda(args: argparse.Namespace) -> int:
    architectures = chosen_architectures(args.arch.split(","))
    library = build_cuda_library(default_cache_dir(), architectures, more_flags=args.more_flags)
    record = read_record(library)
    if args.output is not None:
        for suffix in (RECORD_SUFFIX, library.suffix):
            publish_copy(library.with_suffix(suffix), args.output.with_suffix(suffix))
        library = args.output
    seconds = "" if record is None else f", built in {record.seconds:.0f} s"
    print(f"GPU kernels for {' '.join(architectures)}{seconds}: {library}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
