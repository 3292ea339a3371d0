"""Which pieces of one area are free: powers of two bytes, halved to fit and joined again.

Offsets only; there is no memory here. Every piece lies at a multiple of its size.
"""

__all__ = ["Pieces"]

READY = 128
"""Pieces of each size that are kept as they are: the next call of that size takes one without
halving, and the one after it gives it back without joining."""


class Pieces:
    """The free pieces of an area.

    Args:
        total_bytes: of the area; what is left over below `smallest_bytes` is not used.
        smallest_bytes: of a piece, a power of two.
        largest_bytes: of a piece, a power of two, at most `total_bytes`.
    """

    def __init__(self, *, total_bytes: int, smallest_bytes: int, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        sizes = []
        size = smallest_bytes
        while size <= largest_bytes:
            sizes.append(size)
            size *= 2
        self._joined: dict[int, dict[int, None]] = {size: {} for size in sizes}
        self._ready: dict[int, list[int]] = {size: [] for size in sizes}
        self._fill(total_bytes, sizes)

    def take(self, nbytes: int) -> int | None:
        """Return the offset of a free piece of `nbytes`, one of the sizes; None if there is none.

        There is one if and only if so many bytes at a multiple of `nbytes` are free.
        """
        ready = self._ready[nbytes]
        if ready:
            return ready.pop()
        offset = self._cut(nbytes)
        if offset is None:
            self._join_ready()
            offset = self._cut(nbytes)
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Take back a piece."""
        ready = self._ready[nbytes]
        if len(ready) < READY:
            ready.append(offset)
        else:
            self._join(offset, nbytes)

    def _fill(self, total_bytes: int, sizes: list[int]) -> None:
        offset = 0
        for size in reversed(sizes):
            # The last one in is the first one out: low offsets are used first.
            count = (total_bytes - offset) // size
            for place in reversed(range(count)):
                self._joined[size][offset + place * size] = None
            offset += count * size

    def _cut(self, nbytes: int) -> int | None:
        """Take the smallest joined piece that suffices, and put back what is too much of it."""
        size = nbytes
        while size <= self._largest_bytes:
            free = self._joined[size]
            if free:
                offset, _ = free.popitem()
                while size > nbytes:
                    size //= 2
                    self._joined[size][offset + size] = None
                return offset
            size *= 2
        return None

    def _join(self, offset: int, nbytes: int) -> None:
        while nbytes < self._largest_bytes and offset ^ nbytes in self._joined[nbytes]:
            del self._joined[nbytes][offset ^ nbytes]
            offset &= ~nbytes
            nbytes *= 2
        self._joined[nbytes][offset] = None

    def _join_ready(self) -> None:
        for nbytes, ready in self._ready.items():
            while ready:
                self._join(ready.pop(), nbytes)
