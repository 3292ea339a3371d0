"""Which GPU library is loaded: the package's prebuilt one, the cache's, or a new one.

A library fits by the hash of the sources that it was built from, which is the same on a machine
without any compiler. Nothing is loaded here. Knows no torch.
"""

import contextlib
import platform
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from qlinear_service.kernels.architectures import ARCHITECTURES
from qlinear_service.kernels.build_cuda import (
    WHAT,
    build_cuda_library,
    read_record,
    source_hash,
)
from qlinear_service.kernels.library_cache import is_intact, kept_or_temporary, libraries_folder
from qlinear_service.kernels.ninja import ToolMissing

__all__ = ["PREBUILT", "cuda_library", "find_cuda_library"]

PREBUILT = Path(__file__).resolve().parents[1] / "prebuilt/libqlinear_cuda.so"
"""What `make cuda` and the building of an image put into the package."""


@contextlib.contextmanager
def cuda_library(
    cache_dir: Path,
    architectures: Sequence[str] = ARCHITECTURES,
    *,
    stop: threading.Event | None = None,
) -> Iterator[Path]:
    """Yield a GPU library for at least `architectures` for as long as it takes to load it.

    The package's prebuilt library if it fits these sources, else the cache's, else a new one.

    Raises:
        ToolMissing: there is none, and no compiler or no ninja either.
        BuildError: the compilation failed or was stopped, or no folder can be written.
    """
    prebuilt, why_not = find_cuda_library(cache_dir, architectures, cached=False)
    if prebuilt is not None:
        yield prebuilt
        return

    def build(folder: Path, keep_log: bool) -> Path:
        try:
            return build_cuda_library(folder, architectures, stop=stop, keep_log=keep_log)
        except ToolMissing as error:
            # One that was built while there was a compiler is as good as on that day.
            cached, _ = find_cuda_library(folder, architectures)
            if cached is not None:
                return cached
            raise ToolMissing(f"{error}; {why_not}; until then the CPU serves") from None

    with kept_or_temporary(cache_dir, build, what=WHAT) as library:
        yield library


def find_cuda_library(
    cache_dir: Path, architectures: Sequence[str] = ARCHITECTURES, *, cached: bool = True
) -> tuple[Path | None, str]:
    """Return a library that is there and fits, or None and one clause why the prebuilt does not.

    Builds nothing and needs no compiler.

    Args:
        cache_dir: where built libraries are kept.
        architectures: what the library must hold code for.
        cached: look into the cache, too.
    """
    why_not = _misfit(PREBUILT, architectures)
    if not why_not:
        return PREBUILT, ""
    if cached:
        for library in sorted(libraries_folder(cache_dir).glob("libqlinear_cuda-*.so")):
            if not _misfit(library, architectures):
                return library, ""
    return None, why_not


def _misfit(library: Path, architectures: Sequence[str]) -> str:
    """Return one clause why a library cannot be used here; "" if it can."""
    record = read_record(library)
    if record is None or not library.exists():
        return f"{library} is not there (make cuda makes it)"
    if record.source_hash != source_hash():
        return f"{library} was built from other sources"
    if record.machine != platform.machine():
        return f"{library} is for {record.machine}, and this is {platform.machine()}"
    missing = [each for each in architectures if each not in record.architectures]
    if missing:
        held = " ".join(record.architectures)
        return f"{library} holds code for {held} and not for {' '.join(missing)}"
    return "" if is_intact(library) else f"{library} is damaged"
