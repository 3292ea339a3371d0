"""Measures at start what this machine can do: read times of six sizes, and the rate of products.

Takes a tenth of a second on the engine's thread, before anything is served. Each figure is the
best of several tries: a floor is what nothing beats, and other work makes single tries slower.
"""

import mmap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from qlinear_service.dtypes import DType
from qlinear_service.kernels.backends import Kernels
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import LayerSpec, LogicalLayer
from qlinear_service.roofline import Roofline

__all__ = ["measure", "sizes_to_read"]

SIZES = 6
SMALLEST_BYTES = 512 * 1024
"""Fits into one core's second cache: layers of 1024 x 1024 and less are read at this rate."""

MOST_BYTES = 256 * 1024 * 1024
"""Bounds what the start takes: beyond it even large last-level caches hold a minor part only."""

PASS_BYTES = 4 * 1024 * 1024
"""Small sizes are read again and again until so much was read: a single pass of microseconds would
measure the call around it."""

TRIES = 9
TRIES_SECONDS = 0.02
"""Tries of one thing end after this, where a busy machine makes them long; but three there are."""

PRODUCT_ROWS = (64, 512)
"""Either may be the fastest: from some hundreds on rows are multiplied in another way."""

PRODUCT_SPEC = LayerSpec(
    model="probe",
    module="probe",
    n=512,
    k=1024,
    bits=4,
    group_size=128,
    symmetric=True,
    has_bias=False,
    scale_dtype=DType.BF16,  # the dtype in which processors multiply fastest
)


def measure(kernels: Kernels, *, threads: int) -> Roofline:
    """Return what reading and multiplying take here at least.

    Args:
        kernels: what reads and multiplies.
        threads: most threads of one computation.
    """
    sizes = sizes_to_read(_last_cache_bytes())
    # Mapped and not allocated: with malloc's thresholds pinned the pages would never be returned.
    with mmap.mmap(-1, sizes[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        buffer = torch.frombuffer(memory, dtype=torch.int64)
        buffer.fill_(1)  # untouched pages would all be read from one page of zeros
        times = tuple(_read_seconds(kernels, buffer, nbytes, threads) for nbytes in sizes)
        del buffer  # the mapping cannot close while a view of it is left
    return Roofline(
        sizes_bytes=sizes, read_seconds=times, products_per_second=_products_per_second(kernels)
    )


def sizes_to_read(last_cache_bytes: int) -> tuple[int, ...]:
    """Return six sizes, each a like multiple of the one before, past a cache of that size."""
    largest = min(max(4 * last_cache_bytes, 64 * 1024 * 1024), MOST_BYTES)
    step = (largest / SMALLEST_BYTES) ** (1 / (SIZES - 1))
    sizes = [round(SMALLEST_BYTES * step**i) for i in range(SIZES)]
    return tuple(nbytes - nbytes % 4096 for nbytes in sizes)


def _last_cache_bytes() -> int:
    """Return the size of the largest cache, 0 where the system does not tell."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdecimal() and text[-1] in "KM":
            sizes.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]])
    return max(sizes)


def _read_seconds(kernels: Kernels, buffer: torch.Tensor, nbytes: int, threads: int) -> float:
    """Return the shortest time of one pass over the first `nbytes` bytes.

    With one thread and with all: what fits into caches can be read faster than threads wake up.
    """
    part = buffer[: nbytes // buffer.element_size()]
    passes = max(1, PASS_BYTES // nbytes)
    return min(
        _shortest(partial(kernels.read, part, passes=passes, threads=count)) / passes
        for count in {1, threads}
    )


def _products_per_second(kernels: Kernels) -> float:
    """Return the multiply-adds per second of a layer that fits into caches, at many rows."""
    n, k = PRODUCT_SPEC.n, PRODUCT_SPEC.k
    layer = pack(
        LogicalLayer(
            spec=PRODUCT_SPEC,
            codes=torch.full((k, n), 9, dtype=torch.uint8),
            scales=torch.ones((k // PRODUCT_SPEC.group_size, n), dtype=torch.bfloat16),
        )
    )
    rates = []
    for rows in PRODUCT_ROWS:
        x = torch.ones((rows, k), dtype=torch.bfloat16)
        rates.append(rows * n * k / _shortest(partial(kernels.linear, layer, x, DType.BF16)))
    return max(rates)


def _shortest(action: Callable[[], object]) -> float:
    """Return the shortest of a few times that `action` takes."""
    times: list[float] = []
    while len(times) < 3 or (len(times) < TRIES and sum(times) < TRIES_SECONDS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)
