"""Latencies in bounded memory: buckets of at most 1/128 of their value, from 1 ns on.

Own code because it is thirty lines: each power of two is cut into 128 equal buckets, so a
percentile errs by at most half a bucket, 0.4 %, over the whole range, whatever was recorded.
"""

import math

__all__ = ["Histogram"]

BUCKET_BITS = 7
"""2**7 buckets for each power of two."""


class Histogram:
    """Counts of durations; a bucket exists once something fell into it."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.max_seconds = 0.0
        """Exact, unlike the percentiles."""

    def record(self, seconds: float) -> None:
        """Add one duration; one below zero counts as zero."""
        bucket = _bucket(max(round(seconds * 1e9), 0))
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.count += 1
        self.max_seconds = max(self.max_seconds, seconds)

    def merge(self, other: "Histogram") -> None:
        """Add everything that `other` holds."""
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.count += other.count
        self.max_seconds = max(self.max_seconds, other.max_seconds)

    def percentile(self, percent: float) -> float | None:
        """Return the least duration that `percent` of all do not exceed, None of nothing."""
        if not self.count:
            return None
        # Rounded, because 20,000 times 99.9 % is a hair above 19,980 in binary.
        rank = max(math.ceil(round(self.count * percent / 100, 6)), 1)
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return min(_middle(bucket) / 1e9, self.max_seconds)
        raise AssertionError("the buckets hold fewer durations than were counted")


def _bucket(nanoseconds: int) -> int:
    """Return the number of the bucket; below 2**(BUCKET_BITS + 1) each value has its own."""
    shift = max(nanoseconds.bit_length() - BUCKET_BITS - 1, 0)
    return (shift << BUCKET_BITS) + (nanoseconds >> shift)


def _middle(bucket: int) -> float:
    shift = max((bucket >> BUCKET_BITS) - 1, 0)
    lowest = (bucket - (shift << BUCKET_BITS)) << shift
    return lowest + ((1 << shift) - 1) / 2
