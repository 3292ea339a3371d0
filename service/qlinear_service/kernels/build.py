"""Builds the kernel library from csrc/ with ninja, once for each content of its sources.

The file name carries a hash of every source, the flags and the compiler's version, so an edit or
another compiler builds anew and nothing stale is ever loaded. `make setup` runs this module; the
server runs the same code at start and finds the result.
"""

import contextlib
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qlinear_service.errors import BuildError
from qlinear_service.publish import publish

__all__ = [
    "CPU_SOURCES",
    "SOURCE_ROOT",
    "ToolMissing",
    "build_cpu_library",
    "cpu_library",
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
    "cpu/read_probe.cpp": (),
    "status.cpp": (),
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

WORK_PREFIX = "build-"
LONGEST_BUILD_SECONDS = 3600  # some hundred times what one takes
STOP_CHECK_SECONDS = 0.2


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


@contextlib.contextmanager
def cpu_library(cache_dir: Path, *, stop: threading.Event | None = None) -> Iterator[Path]:
    """Yield the CPU library for as long as it takes to load it.

    Where the cache can be neither used nor written, it is built in a temporary folder, which is
    gone afterwards: a loaded library lives on without its file.

    Raises:
        ToolMissing: there is no C++ compiler or no ninja.
        BuildError: the compilation failed or was stopped, or no folder can be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            library = build_cpu_library(cache_dir, stop=stop)
        except OSError:
            try:
                folder = tempfile.TemporaryDirectory(prefix="qlinear-kernels-")
                temporary = Path(stack.enter_context(folder))
                library = build_cpu_library(temporary, stop=stop, keep_log=False)
            except OSError as error:
                raise BuildError(
                    f"cannot build the CPU kernels in {cache_dir} or a temporary folder: "
                    f"{error.strerror}; name a folder that can be written with --cache-dir"
                ) from None
        yield library


def build_cpu_library(
    cache_dir: Path, *, stop: threading.Event | None = None, keep_log: bool = True
) -> Path:
    """Return the CPU library for these sources, building it if the cache has no intact one.

    Args:
        cache_dir: where built libraries are kept; created on demand.
        stop: set when nobody wants the library any more.
        keep_log: keep what the compiler said, where it failed, in the cache.

    Raises:
        ToolMissing: there is no C++ compiler or no ninja.
        BuildError: the compilation failed or was stopped.
        OSError: the cache holds no intact library and cannot be written.
    """
    tools = _find_toolchain()
    folder = cache_dir / "kernels"
    cached = folder / f"libqlinear_cpu-{_content_hash(tools)}.so"
    if _is_intact(cached):
        return cached
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    log = folder / "build-failed.log" if keep_log else None
    with tempfile.TemporaryDirectory(
        prefix=WORK_PREFIX, dir=folder, ignore_cleanup_errors=True
    ) as work_dir:
        built = _run_ninja(tools, Path(work_dir), cached.name, stop=stop, log=log)
        with built.open("ab") as file:
            file.write(hashlib.sha256(built.read_bytes()).digest())
        publish(built, cached)
    return cached


def _is_intact(library: Path) -> bool:
    """Say whether the file ends with the hash of the rest; the loader of the system ignores it.

    Loading half a file, as a full disk or a power cut leave it, would kill the process.
    """
    try:
        content = library.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _remove_leftovers(folder: Path) -> None:
    """Remove the folders of builds that were killed; those of running ones are young."""
    for work_dir in folder.glob(f"{WORK_PREFIX}*/"):
        with contextlib.suppress(OSError):
            if time.time() - work_dir.stat().st_mtime > LONGEST_BUILD_SECONDS:
                shutil.rmtree(work_dir)


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
    for source in sorted([*SOURCE_ROOT.glob("*.[hc]*"), *SOURCE_ROOT.glob("cpu/*")]):
        digest.update(f"\0{source.name}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_sources() -> dict[str, tuple[str, ...]]:
    """Return the sources for this machine: bodies of x86 are left out elsewhere."""
    if platform.machine() in ("x86_64", "AMD64"):
        return CPU_SOURCES
    return {source: flags for source, flags in CPU_SOURCES.items() if not flags}


def _run_ninja(
    tools: _Toolchain, work_dir: Path, name: str, *, stop: threading.Event | None, log: Path | None
) -> Path:
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
    code, output = _finish([tools.ninja, "-C", str(work_dir)], stop=stop)
    if code != 0:
        said = [line for line in output.splitlines() if line.strip()]
        first = next((line for line in said if " error: " in line), "".join(said[-1:]))
        where = "a cache that can be written keeps the whole output"
        if log is not None:
            log.write_text(output)
            where = f"the whole output is in {log}"
        raise BuildError(f"compiling the CPU kernels failed: {first.strip()}; {where}")
    return work_dir / name


def _finish(command: list[str], *, stop: threading.Event | None) -> tuple[int, str]:
    """Run a command to its end and return its exit code and words; kill it if `stop` is set."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"LC_ALL": "C"},  # errors are looked for by the English word
        start_new_session=True,  # Ctrl-C in the terminal is for us, who then end the command
    )
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=STOP_CHECK_SECONDS)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                if stop is not None and stop.is_set():
                    raise BuildError("compiling the CPU kernels was stopped") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)  # ninja ends its compilers in turn
            process.communicate()


def _escape(path: str | Path) -> str:
    """Return `path` as ninja reads it: blanks, colons and dollars are its own signs."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def main() -> int:
    """Build into the default cache; what the server can do without is a note, not a failure."""
    # So that SIGTERM, too, ends the compilers and removes their folder.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(f"CPU kernels: {build_cpu_library(default_cache_dir())}")
    except ToolMissing as error:
        print(f"note: {error}\nnote: the server will run on plain torch instead")
    except OSError as error:
        print(f"note: cannot keep CPU kernels in {default_cache_dir()}: {error.strerror}")
        print("note: the server will build them at each start; --cache-dir names another folder")
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # what shells report for a program that Ctrl-C ended
    return 0


if __name__ == "__main__":
    sys.exit(main())
