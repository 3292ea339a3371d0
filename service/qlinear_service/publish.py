"""Gives a finished file its final name; whoever sees the name sees all of it, power cut or not.

Without the order data, name, folder a crash can leave the new name on an empty or shortened file.
Standard library only.
"""

import contextlib
import os
from pathlib import Path

__all__ = ["publish"]


def publish(written: Path, final: Path) -> None:
    """Rename the file `written` to `final`, in the same folder or file system.

    Raises:
        OSError: the bytes cannot be stored, or the name cannot be taken.
    """
    _sync(written)
    written.replace(final)
    # The folder holds the name; some file systems cannot sync one.
    with contextlib.suppress(OSError):
        _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
