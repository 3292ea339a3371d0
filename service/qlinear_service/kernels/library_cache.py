"""Where built libraries are kept: one file for each content of its sources, checked before use.

Each file ends with a hash of the rest. Knows nothing of compilers. Standard library only.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from qlinear_service.errors import BuildError
from qlinear_service.publish import publish

__all__ = [
    "default_cache_dir",
    "is_intact",
    "keep",
    "kept_or_temporary",
    "libraries_folder",
    "seal",
]

WORK_PREFIX = "build-"
LONGEST_BUILD_SECONDS = 3600  # some hundred times what one takes


def default_cache_dir() -> Path:
    """Return where built kernels live unless the configuration names another folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "qlinear"


def libraries_folder(cache_dir: Path) -> Path:
    """Return the folder of the libraries inside a cache."""
    return cache_dir / "kernels"


def keep(final: Path, make: Callable[[Path], Path], *, beside: Sequence[str] = ()) -> None:
    """Let `make` build a library in a folder of its own, and give it the name `final`.

    Args:
        final: in the folder of the libraries.
        make: is handed an empty folder and returns the library in it.
        beside: suffixes of files that `make` leaves beside the library and that go with it.

    Raises:
        OSError: the cache cannot be written.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(final.parent)
    with tempfile.TemporaryDirectory(
        prefix=WORK_PREFIX, dir=final.parent, ignore_cleanup_errors=True
    ) as work_dir:
        built = make(Path(work_dir))
        seal(built)
        for suffix in beside:  # first: who sees the library sees them, too
            publish(built.with_suffix(suffix), final.with_suffix(suffix))
        publish(built, final)


@contextlib.contextmanager
def kept_or_temporary(
    cache_dir: Path, build: Callable[[Path, bool], Path], *, what: str
) -> Iterator[Path]:
    """Yield a built library for as long as it takes to load it.

    Where the cache can be neither used nor written, it is built in a temporary folder, which is
    gone afterwards: a loaded library lives on without its file.

    Args:
        cache_dir: where built libraries are kept.
        build: is handed a cache folder and whether logs of failures are to stay in it.
        what: what is built, for errors.

    Raises:
        BuildError: no folder can be written, or what `build` raises.
    """
    with contextlib.ExitStack() as stack:
        try:
            library = build(cache_dir, True)
        except OSError:
            try:
                folder = tempfile.TemporaryDirectory(prefix="qlinear-kernels-")
                temporary = Path(stack.enter_context(folder))
                library = build(temporary, False)
            except OSError as error:
                raise BuildError(
                    f"cannot build {what} in {cache_dir} or a temporary folder: "
                    f"{error.strerror}; name a folder that can be written with --cache-dir"
                ) from None
        yield library


def seal(library: Path) -> None:
    """Append the hash of a library to it; the loader of the system ignores it."""
    with library.open("ab") as file:
        file.write(hashlib.sha256(library.read_bytes()).digest())


def is_intact(library: Path) -> bool:
    """Say whether the file ends with the hash of the rest.

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
