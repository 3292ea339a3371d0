"""Writes a file all or nothing: under a name beside its own until it is complete and on the disk.

The other name is always the same and locked while it is written: what a killed process left there
is overwritten by the next one, two processes never write into one file, and nothing adds up.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

from qlinear_service.publish import publish

__all__ = ["FLUSH_BYTES", "Busy", "Flusher", "replacing"]

FLUSH_BYTES = 64 << 20
"""Written between two flushes: the disk works while the next bytes are made, not at the end."""


class Busy(OSError):
    """Another process is writing the same file."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Yield an empty file that takes the name `path` if the block ends well, else disappears.

    Raises:
        Busy: another process is writing it.
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    file = _locked(partial)
    try:
        yield file
        file.flush()
        publish(partial, path)
    except BaseException:
        # Ours as long as we hold the lock, which is until the file is closed.
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    finally:
        file.close()


def _locked(partial: Path) -> IO[bytes]:
    """Return the file of that name, locked and empty."""
    while True:
        # Not truncated before it is locked: it may be another's, and a whole file by now.
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        file = os.fdopen(descriptor, "wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, partial):
                file.truncate(0)
                return file
        except BlockingIOError:
            file.close()
            raise Busy(f"another process is writing {partial}") from None
        except BaseException:
            file.close()
            raise
        file.close()  # it got its final name, or was removed, before we had the lock


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


class Flusher:
    """Flushes a file on a thread of its own while it is being written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None
        self._waiting_bytes = 0

    def wrote(self, nbytes: int) -> None:
        """Note so many bytes; start a flush if they are many and none is running.

        Raises:
            OSError: the last flush has failed.
        """
        self._waiting_bytes += nbytes
        if self._waiting_bytes < FLUSH_BYTES or not (self._running is None or self._running.done()):
            return
        self.finish()
        self._waiting_bytes = 0
        self._running = self._thread.submit(os.fdatasync, self._file.fileno())

    def finish(self) -> None:
        """Wait for the flush that runs.

        Raises:
            OSError: it has failed.
        """
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def __enter__(self) -> "Flusher":
        return self

    def __exit__(self, *failure: object) -> None:
        self._thread.shutdown(wait=True)
