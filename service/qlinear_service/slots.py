"""The slab: bounded memory for the activations of calls that wait or run.

A *slot* is the memory of one call, named by index and generation, so that whoever holds the name
of a slot that was given back can never touch its next owner's bytes. Knows neither torch nor
grpc. One thread acquires and releases; others may view slots that they were handed.
"""

import mmap
from dataclasses import dataclass

from qlinear_service.config import size_class
from qlinear_service.errors import Overloaded

__all__ = ["KEPT_WHEN_IDLE_BYTES", "Slab", "Slot"]

RETRY_AFTER_SECONDS = 0.1
"""Some tens of batches of a large layer: by then a working server has given slots back."""

KEPT_WHEN_IDLE_BYTES = 64 << 20
"""What stays allocated when nothing is held: a burst of large calls must not cost a gibibyte for
ever, and the next calls of usual size should find their buffers."""

MAPPED_FROM_BYTES = 128 * 1024
"""Larger buffers are mapped: untouched pages cost nothing. Smaller ones would waste a page each
and, a million of them, run into the kernel's limit of mappings."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The name of a piece of the slab; plain numbers, fit for a descriptor."""

    index: int
    generation: int


@dataclass(slots=True)
class _Record:
    buffer: bytearray | mmap.mmap | None = None
    class_bytes: int = 0
    generation: int = 0
    users: int = 0


class Slab:
    """Slots of powers of two bytes from 1 KiB on; their sum never exceeds the capacity.

    Buffers are allocated at first use, kept for the next call of their size class, and dropped when
    another class needs the room or, but for some, when nothing is held any more.

    Args:
        capacity_bytes: most bytes of all buffers together, used or kept.
        largest_bytes: most bytes of one slot; at most `capacity_bytes`.
    """

    def __init__(self, *, capacity_bytes: int, largest_bytes: int) -> None:
        if size_class(largest_bytes) > capacity_bytes:
            raise ValueError(f"a slot of {largest_bytes} bytes exceeds capacity {capacity_bytes}")
        self._capacity_bytes = capacity_bytes
        self._largest_bytes = size_class(largest_bytes)
        self._records: list[_Record] = []
        self._kept: dict[int, list[int]] = {}  # class -> indexes of free slots with a buffer
        self._bare: list[int] = []  # indexes of free slots without one
        self._used_bytes = 0
        self._kept_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are held, rounded up to their classes."""
        return self._used_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all buffers, held or kept for later."""
        return self._used_bytes + self._kept_bytes

    def acquire(self, nbytes: int, *, users: int = 1) -> Slot:
        """Return a slot of at least `nbytes` bytes, free once it was released `users` times.

        Raises:
            Overloaded: no room now.
            ValueError: `nbytes` exceeds the largest slot; the codec lets no such call through.
        """
        class_bytes = size_class(nbytes)
        if class_bytes > self._largest_bytes:
            raise ValueError(f"slot of {nbytes} bytes; the largest is {self._largest_bytes}")
        if self._used_bytes + class_bytes > self._capacity_bytes:
            raise Overloaded(
                f"the queue holds {self._used_bytes} of {self._capacity_bytes} bytes and this call "
                f"needs {class_bytes}; send it again later",
                retry_after_seconds=RETRY_AFTER_SECONDS,
                reason="queue_bytes",
            )
        index = self._free_index(class_bytes)
        record = self._records[index]
        record.users = users
        self._used_bytes += class_bytes
        return Slot(index, record.generation)

    def view(self, slot: Slot) -> memoryview:
        """Return the whole of a held slot as writable bytes; any thread may call this."""
        buffer = self._held(slot).buffer
        assert buffer is not None, "a held slot has a buffer"
        return memoryview(buffer)

    def release(self, slot: Slot) -> None:
        """Give up one use of `slot`; the last one frees it and makes its name stale."""
        record = self._held(slot)
        record.users -= 1
        if record.users:
            return
        record.generation += 1
        self._used_bytes -= record.class_bytes
        self._kept_bytes += record.class_bytes
        self._kept.setdefault(record.class_bytes, []).append(slot.index)
        if self._used_bytes == 0:
            self._drop_kept(KEPT_WHEN_IDLE_BYTES)

    def _held(self, slot: Slot) -> _Record:
        record = self._records[slot.index]
        if record.generation != slot.generation or record.users == 0:
            raise RuntimeError(f"stale {slot}: the slab is at generation {record.generation}")
        return record

    def _free_index(self, class_bytes: int) -> int:
        if self._kept.get(class_bytes):
            self._kept_bytes -= class_bytes
            return self._kept[class_bytes].pop()
        self._drop_kept(self._capacity_bytes - self._used_bytes - class_bytes)
        if self._bare:
            index = self._bare.pop()
        else:
            index = len(self._records)
            self._records.append(_Record())
        record = self._records[index]
        mapped = class_bytes >= MAPPED_FROM_BYTES
        record.buffer = mmap.mmap(-1, class_bytes) if mapped else bytearray(class_bytes)
        record.class_bytes = class_bytes
        return index

    def _drop_kept(self, most_bytes: int) -> None:
        """Drop kept buffers, largest first, until at most `most_bytes` of them are left."""
        if self._kept_bytes <= most_bytes:
            return
        for kept_class in sorted(self._kept, reverse=True):
            indexes = self._kept[kept_class]
            while indexes and self._kept_bytes > most_bytes:
                index = indexes.pop()
                self._records[index].buffer = None
                self._kept_bytes -= kept_class
                self._bare.append(index)
