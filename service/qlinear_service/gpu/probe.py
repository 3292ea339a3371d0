"""Measures at start what this GPU can do: read times of six sizes, products, and a pair of events.

All of it before layers are loaded, while there is room; takes some tenths of a second.
"""

import statistics

import torch

from qlinear_service.dtypes import DType
from qlinear_service.gpu.made_up import made_up_layer
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.roofline import Roofline

__all__ = ["measure", "pair_seconds", "sizes_to_read"]

SIZES = 6
SMALLEST_BYTES = 1 << 20
LARGEST_BYTES = 1 << 29
"""Read at the rate of anything larger, and half a GiB is free on every GPU that we support."""

MOST_PIECES = 256
"""Reads of one size in a row; the launches of more would make the start long."""

PAIRS = 64
BUSY_BYTES = 1 << 28
"""Reading so much takes the fastest GPU 50 microseconds, in which a host can ask for a lot."""

PRODUCT_ROWS = (512, 2048)
PRODUCT_FEATURES = 8192
PRODUCT_TRIES = 6


def measure(kernels: CudaKernels) -> Roofline:
    """Return what reading and multiplying take on this GPU at least."""
    sizes = sizes_to_read()
    # Several times the second cache, so that small pieces are cold when their turn comes.
    total = max(sizes[-1], 4 * kernels.info.l2_bytes)
    memory = torch.ones(total, dtype=torch.uint8, device=kernels.device)
    times = []
    for nbytes in sizes:
        part = memory[: min(MOST_PIECES * nbytes, total)]
        times.append(kernels.read_seconds(part, nbytes))
    del memory, part
    rate = max(_products_per_second(kernels, rows) for rows in PRODUCT_ROWS)
    torch.cuda.empty_cache()  # layers are to find all of it
    return Roofline(sizes_bytes=sizes, read_seconds=tuple(times), products_per_second=rate)


def sizes_to_read() -> tuple[int, ...]:
    """Return six sizes from 1 to 512 MiB, each a like multiple of the one before."""
    step = (LARGEST_BYTES / SMALLEST_BYTES) ** (1 / (SIZES - 1))
    sizes = [round(SMALLEST_BYTES * step**i) for i in range(SIZES)]
    return tuple(nbytes - nbytes % 4096 for nbytes in sizes)


def pair_seconds(kernels: CudaKernels, stream: torch.cuda.Stream) -> float:
    """Return what a pair of events measures beyond the kernel between them, on `stream`.

    Measured where batches are: behind other work, so that the device never waits for the host
    between the two events. What a second empty kernel adds is the time of a kernel, not of the
    pair, so that of the first is taken off, too.
    """
    busy = torch.empty(BUSY_BYTES, dtype=torch.uint8, device=kernels.device)
    first, second = (_empty_kernels_seconds(kernels, stream, count, busy) for count in (1, 2))
    return max(2 * first - second, 0.0)


def _empty_kernels_seconds(
    kernels: CudaKernels, stream: torch.cuda.Stream, count: int, busy: torch.Tensor
) -> float:
    """Return the time between two events around empty kernels that wait behind a read of `busy`."""
    runtime, empty = kernels.runtime, kernels.library.ql_cuda_empty
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    launches = [runtime.launch(stream, "empty", (before, after)) for _ in range(count)]
    for launch in launches[1:]:
        launch.start_event = None
    for launch in launches[:-1]:
        launch.stop_event = None
    hidden: list[float] = []
    exposed: list[float] = []
    for _ in range(PAIRS):
        kernels.occupy(busy, stream)
        for launch in launches:
            runtime.check(empty(launch), "empty")
        # What had begun before all was asked for may have waited for the host.
        times = exposed if before.query() else hidden  # type: ignore[no-untyped-call]
        kernels.wait(stream)
        times.append(before.elapsed_time(after) / 1e3)
    return float(statistics.median(hidden or exposed))


def _products_per_second(kernels: CudaKernels, rows: int) -> float:
    """Return the multiply-adds per second of a large layer."""
    layer = made_up_layer(
        n=PRODUCT_FEATURES,
        k=PRODUCT_FEATURES,
        bits=4,
        group_size=128,
        symmetric=True,
        scale_dtype=DType.F16,
        device=kernels.device,
    )
    x = torch.ones((rows, PRODUCT_FEATURES), dtype=torch.float16, device=kernels.device)
    y = torch.empty_like(x)
    seconds = []
    for _ in range(PRODUCT_TRIES):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        kernels.linear(layer, x, DType.F16, out=y, events=(before, after))
        kernels.wait()
        seconds.append(before.elapsed_time(after) / 1e3)
    return rows * PRODUCT_FEATURES * PRODUCT_FEATURES / float(min(seconds))
