"""The slab: bounded memory for the activations of calls that wait or run, in one area.

A *slot* is the memory of one call, named by index and generation, so that whoever holds the name
of a slot that was given back can never touch its next owner's bytes. One area, so that a device can
be let into all of it at once. Knows neither torch nor grpc. One thread acquires and releases;
others may view slots that they were handed.
"""

import ctypes
import itertools
import mmap
from dataclasses import dataclass

from qlinear_service.config import SMALLEST_SLOT_BYTES, size_class
from qlinear_service.errors import ConfigError, Overloaded
from qlinear_service.pieces import Pieces

__all__ = ["KEPT_WHEN_IDLE_BYTES", "Slab", "Slot"]

RETRY_AFTER_SECONDS = 0.1
"""Some tens of batches of a large layer: by then a working server has given slots back."""

KEPT_WHEN_IDLE_BYTES = 64 << 20
"""What stays in memory when nothing is held: a burst of large calls must not cost a gibibyte for
ever, and the next calls of usual size should find their pages."""

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Pages cost memory when they are first written, not before."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The name of a piece of the slab; plain numbers, fit for a descriptor."""

    index: int
    """Where it begins, in units of the smallest slot."""
    generation: int
    """Different for each owner of any slot."""


class _Record:
    """A slot that is held."""

    __slots__ = ("class_bytes", "generation", "users")

    def __init__(self, class_bytes: int, generation: int, users: int) -> None:
        self.class_bytes = class_bytes
        self.generation = generation
        self.users = users


class Slab:
    """Slots of powers of two bytes from 1 KiB on, each at a multiple of its size in one area.

    Args:
        capacity_bytes: of the area.
        largest_bytes: most bytes of one slot; at most `capacity_bytes`.

    Raises:
        ConfigError: there is no address space for so much.
    """

    def __init__(self, *, capacity_bytes: int, largest_bytes: int) -> None:
        largest_class = size_class(largest_bytes)
        if largest_class > capacity_bytes:
            raise ValueError(f"a slot of {largest_bytes} bytes exceeds capacity {capacity_bytes}")
        self._capacity_bytes = capacity_bytes
        self._largest_bytes = largest_class
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._area = mmap.mmap(-1, capacity_bytes, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"the queue cannot get {capacity_bytes} bytes of address space ({error}); choose "
                "a smaller --max-queue-bytes"
            ) from None
        self.address: int = ctypes.addressof(ctypes.c_char.from_buffer(self._area))
        """Where the area begins in this process."""
        self._bytes = memoryview(self._area)
        self._pieces = self._all_free()
        self._records: dict[int, _Record] = {}
        self._generations = itertools.count(1)
        self._used_bytes = 0
        self._touched_bytes = 0
        self._is_pinned = False

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the area."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are held, rounded up to their classes."""
        return self._used_bytes

    @property
    def touched_bytes(self) -> int:
        """Bytes of the area, from its beginning, that may hold memory of this process."""
        return self._touched_bytes

    def pin(self) -> None:
        """Keep every page where it is from now on: a device knows them by their place.

        In a child process they are missing: a page that both had would be another one here after
        the next write, and the device would not know.
        """
        self._is_pinned = True
        self._area.madvise(mmap.MADV_DONTFORK)
        self._touched_bytes = self._capacity_bytes

    def acquire(self, nbytes: int, *, users: int = 1) -> Slot:
        """Return a slot of at least `nbytes` bytes, free once it was released `users` times.

        Raises:
            Overloaded: no room now.
            ValueError: `nbytes` exceeds the largest slot; the codec lets no such call through.
        """
        class_bytes = size_class(nbytes)
        if class_bytes > self._largest_bytes:
            raise ValueError(f"slot of {nbytes} bytes; the largest is {self._largest_bytes}")
        offset = self._pieces.take(class_bytes)
        if offset is None:
            raise Overloaded(
                f"the queue holds {self._used_bytes} of {self._capacity_bytes} bytes and this call "
                f"needs {class_bytes} in one piece; send it again later",
                retry_after_seconds=RETRY_AFTER_SECONDS,
                reason="queue_bytes",
            )
        end = offset + class_bytes
        if end > self._touched_bytes:
            self._touched_bytes = end
        self._used_bytes += class_bytes
        index, generation = offset // SMALLEST_SLOT_BYTES, next(self._generations)
        self._records[index] = _Record(class_bytes, generation, users)
        return Slot(index, generation)

    def view(self, slot: Slot) -> memoryview:
        """Return the whole of a held slot as writable bytes; any thread may call this."""
        class_bytes = self._held(slot).class_bytes
        begin = slot.index * SMALLEST_SLOT_BYTES
        return self._bytes[begin : begin + class_bytes]

    def address_of(self, slot: Slot) -> int:
        """Return where a held slot begins in this process; any thread may call this."""
        self._held(slot)
        return self.address + slot.index * SMALLEST_SLOT_BYTES

    def room_for_result(self, slot: Slot, nbytes: int) -> bool:
        """Say whether results of `nbytes` may take the place of what lies in a held slot.

        Not where somebody else still reads it.
        """
        record = self._held(slot)
        return record.users == 1 and nbytes <= record.class_bytes

    def release(self, slot: Slot) -> None:
        """Give up one use of `slot`; the last one frees it and makes its name stale."""
        record = self._held(slot)
        record.users -= 1
        if record.users:
            return
        del self._records[slot.index]
        self._used_bytes -= record.class_bytes
        self._pieces.give(slot.index * SMALLEST_SLOT_BYTES, record.class_bytes)
        if self._used_bytes == 0 and self._touched_bytes > KEPT_WHEN_IDLE_BYTES:
            self._drop_pages()

    def _held(self, slot: Slot) -> _Record:
        record = self._records.get(slot.index)
        if record is None or record.generation != slot.generation:
            raise RuntimeError(f"stale {slot}: the slab has given its memory to nobody or another")
        return record

    def _all_free(self) -> Pieces:
        return Pieces(
            total_bytes=self._capacity_bytes,
            smallest_bytes=SMALLEST_SLOT_BYTES,
            largest_bytes=self._largest_bytes,
        )

    def _drop_pages(self) -> None:
        """Give the system back what lies beyond what is kept; nothing is held."""
        if self._is_pinned:
            return
        self._area.madvise(
            mmap.MADV_DONTNEED, KEPT_WHEN_IDLE_BYTES, self._touched_bytes - KEPT_WHEN_IDLE_BYTES
        )
        self._touched_bytes = KEPT_WHEN_IDLE_BYTES
        self._pieces = self._all_free()
