"""The native dispatcher as Python calls it: items in, completions out, and one word of each item.

A completion is a plain tuple. The event loop's thread alone calls this. Knows no batch and no
caller.
"""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from qlinear_service.dispatch.abi import Completion, Descriptor, DispatchOptions, dispatching
from qlinear_service.kernels.cuda_abi import CudaPlan

__all__ = ["Ended", "NativeDispatch"]

TAKEN_AT_ONCE = 1024

_pack_item = struct.Struct(Descriptor.FORMAT).pack
_completions = struct.Struct(Completion.FORMAT)


class Ended(NamedTuple):
    """One completion; csrc/linear_dispatch.h says what its numbers mean."""

    sequence: int
    batch: int
    kernel_nanoseconds: int
    in_nanoseconds: int
    out_nanoseconds: int
    seconds: float
    rows: int
    start: int
    layer: int
    kind: int
    is_last: int
    status: int

    @property
    def is_timed(self) -> bool:
        """Whether the times of a batch are its own."""
        return self.in_nanoseconds >= 0

    def copies(self) -> tuple[tuple[str, int], ...]:
        """Return label `direction` and nanoseconds of each copy of a batch that is timed."""
        if not self.is_timed:
            return ()
        return (("to_device", self.in_nanoseconds), ("from_device", self.out_nanoseconds))


class NativeDispatch:
    """One dispatcher and its thread.

    Args:
        library: of the GPU.
        options: all but `done_fd`; what they point to must outlive this.

    Raises:
        BuildError: the library has no dispatcher.
        RuntimeError: no thread can be made.
    """

    def __init__(self, library: ctypes.CDLL, options: DispatchOptions) -> None:
        self._library = dispatching(library)
        self._options = options
        self.done_fd = options.done_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Becomes readable when something has ended."""
        self._handle: int | None = library.ql_dispatch_new(options)
        if not self._handle:
            os.close(self.done_fd)
            raise RuntimeError("the dispatcher cannot start its thread")
        self._rows_left = library.ql_dispatch_rows_left(self._handle)
        self._all = options.queue.layers_count
        self._buffer = (Completion * TAKEN_AT_ONCE)()
        self._bytes = memoryview(self._buffer).cast("B")

    @property
    def is_closed(self) -> bool:
        """Nothing runs any more, and nothing can."""
        return self._handle is None

    def submit(self, items: Sequence[tuple[Any, ...]]) -> None:
        """Hand in the items of one call; each is the fields of a `Descriptor`."""
        packed = b"".join([_pack_item(*item) for item in items])
        self._library.ql_dispatch_submit(self._handle, packed, len(items))

    def ended(self) -> Iterator[Ended]:
        """Yield what has ended since, in order."""
        with contextlib.suppress(BlockingIOError):  # told and not looked, or looked and not told
            os.read(self.done_fd, 8)
        count = TAKEN_AT_ONCE
        while count == TAKEN_AT_ONCE:
            count = self._library.ql_dispatch_drain(self._handle, self._buffer, TAKEN_AT_ONCE)
            # A copy: whoever is told may ask for more before the last one was looked at.
            taken = bytes(self._bytes[: count * _completions.size])
            for fields in _completions.iter_unpack(taken):
                yield Ended._make(fields)

    def cancel(self, sequence: int) -> bool:
        """Take an item back, or what has not begun; return whether its slot is free at once.

        If not, its last completion is still to come, or has come.
        """
        return self.is_closed or bool(self._library.ql_dispatch_cancel(self._handle, sequence))

    def has_begun(self, sequence: int) -> bool:
        """Say whether any row of an item has been taken, or it left in another way."""
        return self.is_closed or bool(self._library.ql_dispatch_has_begun(self._handle, sequence))

    def host_joins(self, batch: int) -> None:
        """Give back the place of a batch that the host computes in one with another one."""
        if not self.is_closed:
            self._library.ql_dispatch_host_joins(self._handle, batch)

    def host_done(self, batch: int) -> None:
        """End a batch that was left to the host."""
        if not self.is_closed:
            self._library.ql_dispatch_host_done(self._handle, batch)

    def plan(self, form: int, x_dtype: int, y_dtype: int, rows: int, plan: CudaPlan) -> None:
        """Say how products of a form and so many rows are cut."""
        self._library.ql_dispatch_plan(self._handle, form, x_dtype, y_dtype, rows, plan)

    def rows_left(self, layer: int | None = None) -> int:
        """Return the rows that have ever left the queue, of one layer or of all; any thread."""
        left: int = self._rows_left[self._all if layer is None else layer]
        return left

    def oldest(self) -> float:
        """Return when the oldest batch on the device began, 0 if none runs there."""
        began: float = self._library.ql_dispatch_oldest(self._handle)
        return began

    def error_text(self) -> str:
        """Return why the last batch that failed did so."""
        return str(self._library.ql_dispatch_error_text(self._handle).decode(errors="replace"))

    def stop(self, timeout_seconds: float) -> bool:
        """End the thread after what runs on the device; return whether it ended in time.

        If it did not, nothing of this may be freed, ever.
        """
        return bool(self._library.ql_dispatch_stop(self._handle, timeout_seconds))

    def close(self) -> None:
        """Free everything, after a `stop` that succeeded; nothing else is called after it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            # Whoever reads metrics may still ask.
            self._rows_left = [self._rows_left[place] for place in range(self._all + 1)]
            self._library.ql_dispatch_free(handle)
            os.close(self.done_fd)
