"""How long a layer must take at least: what this machine was measured to do at start.

Pure arithmetic over measured points. `probe.py` measures them; metrics compare with them.
"""

from bisect import bisect_left
from dataclasses import dataclass

__all__ = ["Roofline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Read times of some sizes and the rate of products."""

    sizes_bytes: tuple[int, ...]
    """Ascending, one or more."""
    read_seconds: tuple[float, ...]
    """For each size the shortest time in which it was read."""
    products_per_second: float
    """Multiply-adds of the kernels at many rows."""

    @property
    def peak_bytes_per_second(self) -> float:
        """The largest rate at which any size was read."""
        rates = zip(self.sizes_bytes, self.read_seconds, strict=True)
        return max(nbytes / seconds for nbytes, seconds in rates)

    def read_floor_seconds(self, nbytes: int) -> float:
        """Return the time of reading `nbytes`, on the line between the two sizes around it.

        Below the smallest size and beyond the largest their rates hold.
        """
        sizes, times = self.sizes_bytes, self.read_seconds
        above = bisect_left(sizes, nbytes)
        if above == 0:
            return nbytes / sizes[0] * times[0]
        if above == len(sizes):
            return nbytes / sizes[-1] * times[-1]
        share = (nbytes - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return times[above - 1] + share * (times[above] - times[above - 1])

    def together(self, count: int) -> "Roofline":
        """Return what `count` such machines can do that share out all they read and multiply."""
        return Roofline(
            sizes_bytes=tuple(count * nbytes for nbytes in self.sizes_bytes),
            read_seconds=self.read_seconds,
            products_per_second=count * self.products_per_second,
        )

    def floor_seconds(self, nbytes: int, products: int) -> float:
        """Return the larger of reading `nbytes` and multiplying and adding `products` times."""
        return max(self.read_floor_seconds(nbytes), products / self.products_per_second)
