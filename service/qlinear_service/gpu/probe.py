"""Measures at start what this GPU can do: read times of six sizes, products, and a pair of events.

All of it before layers are loaded, while there is room; takes some tenths of a second.
"""

import statistics

import torch

from qlinear_service.dtypes import DType
from qlinear_service.gpu.made_up import made_up_layer
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.layers import QuantizedLinear
from qlinear_service.roofline import Roofline

__all__ = ["measure", "pair_seconds", "sizes_to_read"]

SIZES = 6
SMALLEST_BYTES = 1 << 20
LARGEST_BYTES = 1 << 29
"""Read at the rate of anything larger, and half a GiB is free on every GPU that we support."""

MOST_PIECES = 256
"""Reads of one size in a row; the launches of more would make the start long."""

PAIRS = 64
PAIR_FEATURES = 4096
BUSY_BYTES, BUSY_READS = 1 << 28, 4
"""Reading so much takes the fastest GPU 200 microseconds, in which a host can ask for a lot."""

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


def pair_seconds(kernels: CudaKernels, rows: torch.cuda.Stream, stream: torch.cuda.Stream) -> float:
    """Return what a pair of events measures beyond the product between them, on `stream`.

    Measured as batches are: after a wait for the stream of their `rows`, and with so much to do
    before that the device never waits for the host. What a second product adds is the time of a
    product, not of the pair, so that of the first is taken off, too.
    """
    layers = [_layer(kernels, PAIR_FEATURES) for _ in range(2)]  # the second is cold, as the first
    x = torch.ones((1, PAIR_FEATURES), dtype=torch.float16, device=kernels.device)
    y = torch.empty_like(x)
    busy = torch.empty(BUSY_BYTES, dtype=torch.uint8, device=kernels.device)
    torch.cuda.current_stream(kernels.device).synchronize()

    def seconds(count: int) -> float:
        hidden: list[float] = []
        exposed: list[float] = []
        for _ in range(PAIRS):
            arrived = torch.cuda.Event()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            for _ in range(BUSY_READS):
                kernels.occupy(busy, rows)
            arrived.record(rows)
            stream.wait_event(arrived)
            before.record(stream)
            for layer in layers[:count]:
                kernels.linear(layer, x, DType.F16, out=y, stream=stream)
            after.record(stream)
            # What had begun before all was asked for may have waited for the host.
            times = exposed if before.query() else hidden
            kernels.wait(stream)
            times.append(before.elapsed_time(after) / 1e3)
        return float(statistics.median(hidden or exposed))

    return max(2 * seconds(1) - seconds(2), 0.0)


def _layer(kernels: CudaKernels, features: int) -> QuantizedLinear:
    return made_up_layer(
        n=features,
        k=features,
        bits=4,
        group_size=128,
        symmetric=True,
        scale_dtype=DType.F16,
        device=kernels.device,
    )


def _products_per_second(kernels: CudaKernels, rows: int) -> float:
    """Return the multiply-adds per second of a large layer."""
    layer = _layer(kernels, PRODUCT_FEATURES)
    x = torch.ones((rows, PRODUCT_FEATURES), dtype=torch.float16, device=kernels.device)
    y = torch.empty_like(x)
    seconds = []
    for _ in range(PRODUCT_TRIES):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        kernels.linear(layer, x, DType.F16, out=y, events=(before, after))
        kernels.wait()
        seconds.append(before.elapsed_time(after) / 1e3)
    return rows * PRODUCT_FEATURES * PRODUCT_FEATURES / float(min(seconds))
