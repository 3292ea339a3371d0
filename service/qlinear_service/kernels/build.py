"""Builds the kernel library from csrc/ with ninja, once for each content of its sources.

The file name carries a hash of every source, the flags and the compiler's version, so an edit or
another compiler builds anew and nothing stale is ever loaded. `make setup` runs this module; the
server runs the same code at start and finds the result.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from qlinear_service.errors import BuildError

__all__ = [
    "CPU_SOURCES",
    "SOURCE_ROOT",
    "ToolMissing",
    "build_cpu_library",
    "default_cache_dir",
    "main",
]

SOURCE_ROOT = Path(__file__).resolve().parents[1] / "csrc"
"""The C++ sources: a link to the checkout's csrc/, a copy of it in an installed package."""

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
    "cpu/status.cpp": (),
    "cpu/dequantize.cpp": (),
    "cpu/body_plain.cpp": (),
    "cpu/body_avx2.cpp": AVX2_FLAGS,
    "cpu/body_avx512.cpp": AVX512_FLAGS,
    "cpu/body_avx512_bf16.cpp": (*AVX512_FLAGS, "-mavx512bf16"),
}
"""Every source of the CPU library with the flags of its instruction set. The library asks the
processor before it calls a body, so one build serves all x86-64 machines."""

# No -ffast-math: sums keep their order and NaN stays NaN.
CPU_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-Wall", "-Wextra", "-Werror")


class ToolMissing(BuildError):
    """There is no compiler or no ninja here; the text says which and how to get it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Toolchain:
    compiler: str
    version: str
    ninja: str


def default_cache_dir() -> Path:
    """Return where built kernels live unless the configuration names another folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "qlinear"


def build_cpu_library(cache_dir: Path) -> Path:
    """Return the CPU library for these sources, building it if the cache has none.

    Args:
        cache_dir: where built libraries are kept; created on demand. Where it cannot be written
            and holds no fitting library, the build goes to a temporary folder.

    Raises:
        ToolMissing: there is no C++ compiler or no ninja.
        BuildError: the compilation failed; carries the compiler's words.
    """
    tools = _find_toolchain()
    name = f"libqlinear_cpu-{_content_hash(tools)}.so"
    cached = cache_dir / "kernels" / name
    if cached.is_file():
        return cached
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        work_dir = Path(tempfile.mkdtemp(prefix="build-", dir=cached.parent))
    except OSError:
        cached = Path(tempfile.mkdtemp(prefix="qlinear-kernels-")) / name
        work_dir = Path(tempfile.mkdtemp(prefix="build-", dir=cached.parent))
    try:
        built = _run_ninja(tools, work_dir, name)
        # Renaming within a folder is atomic: a second process sees all of the file or nothing.
        built.replace(cached)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    return cached


def _find_toolchain() -> _Toolchain:
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        raise ToolMissing("no C++ compiler: install g++ (Debian: apt-get install g++), or set CXX")
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}{os.pathsep}{_path()}")
    if ninja is None:
        raise ToolMissing("no ninja: install it with: pip install ninja")
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout.partition("\n")[0]
    return _Toolchain(compiler=compiler, version=version, ninja=ninja)


def _path() -> str:
    return os.environ.get("PATH", os.defpath)


def _content_hash(tools: _Toolchain) -> str:
    digest = hashlib.sha256()
    digest.update(f"{tools.version}\0{CPU_FLAGS}\0{_cpu_sources()}".encode())
    # Every file that a source could include, not a list that somebody forgets to extend.
    for source in sorted([*SOURCE_ROOT.glob("*.h"), *SOURCE_ROOT.glob("cpu/*")]):
        digest.update(f"\0{source.name}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_sources() -> dict[str, tuple[str, ...]]:
    """Return the sources for this machine: bodies of x86 are left out elsewhere."""
    if platform.machine() in ("x86_64", "AMD64"):
        return CPU_SOURCES
    return {source: flags for source, flags in CPU_SOURCES.items() if not flags}


def _run_ninja(tools: _Toolchain, work_dir: Path, name: str) -> Path:
    objects = []
    lines = [
        f"flags = {' '.join(CPU_FLAGS)} -I{_escape(SOURCE_ROOT)}",
        "rule compile",
        f"  command = {_escape(tools.compiler)} $flags -MMD -c $in -o $out",
        "rule link",
        f"  command = {_escape(tools.compiler)} -shared -fopenmp $in -o $out",
    ]
    for source, flags in _cpu_sources().items():
        objects.append(f"{Path(source).stem}.o")
        lines.append(f"build {objects[-1]}: compile {_escape(SOURCE_ROOT / source)}")
        lines.append(f"  flags = $flags {' '.join(flags)}")
    lines.append(f"build {name}: link {' '.join(objects)}")
    (work_dir / "build.ninja").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [tools.ninja, "-C", str(work_dir)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"compiling the CPU kernels failed:\n{done.stdout}{done.stderr}")
    return work_dir / name


def _escape(path: str | Path) -> str:
    """Return `path` as ninja reads it: blanks, colons and dollars are its own signs."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def main() -> int:
    """Build into the default cache; a missing compiler is a note, not a failure."""
    try:
        library = build_cpu_library(default_cache_dir())
    except ToolMissing as error:
        print(f"note: {error}\nnote: the server will run on plain torch instead")
        return 0
    print(f"CPU kernels: {library}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
