"""Gives a finished file its final name; whoever sees the name sees all of it, power cut or not.

Without the order data, name, folder a crash can leave the new name on an empty or shortened file.
Standard library only.
"""

import contextlib
import os
import shutil
from pathlib import Path

__all__ = ["publish", "publish_copy"]


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


def publish_copy(source: Path, final: Path) -> None:
    """Copy the file `source` to `final`, whose folder is made on demand.

    Raises:
        OSError: the bytes cannot be stored, or the name cannot be taken.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    copy = final.with_name(f"{final.name}.new")
    shutil.copyfile(source, copy)
    publish(copy, final)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
