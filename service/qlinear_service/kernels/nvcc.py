"""Finds the CUDA compiler: the user's, the system's, or the one that pip can install.

Standard library only. Run as a program it says which; exit code 1 if there is none.
"""

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from qlinear_service.kernels.ninja import ToolMissing, version_of

__all__ = ["find_nvcc", "link_folders", "main"]

OLDEST = (12, 8)
"""The first release that knows every architecture of ours."""

USUAL_HOME = "/usr/local/cuda"

HOW_TO_GET = (
    "install the CUDA toolkit, or into this Python: pip install 'qlinear[cuda-compiler]', or name "
    "one with NVCC"
)


def find_nvcc() -> tuple[str, str]:
    """Return the path and the version of the first nvcc that is new enough.

    Raises:
        ToolMissing: there is none; the text names those that are too old.
    """
    too_old = []
    for nvcc in _candidates():
        text = version_of(nvcc)
        found = re.search(r"release (\d+)\.(\d+)(?:, (V[\d.]+))?", text)
        if found is None:
            too_old.append(f"{nvcc} does not tell its version")
        elif (int(found[1]), int(found[2])) < OLDEST:
            too_old.append(f"{nvcc} is {found[1]}.{found[2]}")
        else:
            return nvcc, f"nvcc {found[3] or found[0]}"
    found_text = f" ({'; '.join(too_old)})" if too_old else ""
    oldest = ".".join(map(str, OLDEST))
    raise ToolMissing(f"no nvcc of CUDA {oldest} or newer{found_text}: {HOW_TO_GET}")


def link_folders(nvcc: str) -> list[Path]:
    """Return where the CUDA runtime lies beside an nvcc that does not look there by itself.

    The packages on PyPI have it in lib/, and their nvcc looks into lib64/.
    """
    folder = Path(nvcc).resolve().parents[1] / "lib"
    return [folder] if (folder / "libcudart_static.a").exists() else []


def _candidates() -> Iterator[str]:
    """Yield every nvcc there is, each once, the user's own choice alone where he made one."""
    chosen = os.environ.get("NVCC")
    if chosen:
        nvcc = shutil.which(chosen)
        if nvcc is None:
            raise ToolMissing(f"NVCC is {chosen!r}, and there is no such program: {HOW_TO_GET}")
        yield nvcc
        return
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), USUAL_HOME]
    packages = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/"), reverse=True)
    places = [shutil.which("nvcc"), *(f"{home}/bin/nvcc" for home in (*homes, *packages) if home)]
    for place in dict.fromkeys(places):
        if place is not None and os.access(place, os.X_OK):
            yield place


def main() -> int:
    """Print which nvcc is used, or what to do about it."""
    try:
        print("CUDA compiler: {} ({})".format(*find_nvcc()))
    except ToolMissing as error:
        print(f"note: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
