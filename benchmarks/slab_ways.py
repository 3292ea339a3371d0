"""Both ways across the bus, size by size: what `gpu/ways.py` decides with.

For each shape and number of rows, every row in a slot of its own: what one batch takes from its
rows in the slab to its results, what its steps take on the device, and how many rows a second pass
through with all stages in use. `slab` gathers and scatters, `mixed` gathers and copies results out,
`pinned` copies both.
"""

import asyncio
import itertools
import statistics
import time
from typing import Any
from unittest import mock

import torch

from qlinear_service.batching import Batch, BatchKey, Part, WorkItem
from qlinear_service.config import size_class
from qlinear_service.dtypes import DType
from qlinear_service.gpu import engine as gpu_engine
from qlinear_service.gpu.engine import STAGES, GpuEngine
from qlinear_service.gpu.streams import Device
from qlinear_service.gpu.ways import Batched, Way
from qlinear_service.layers import LayerRegistry, QuantizedLinear
from qlinear_service.results import BatchResult
from qlinear_service.roofline import Roofline
from qlinear_service.slots import Slab

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
WAYS = {
    "slab": Way(gather=True, scatter=True),
    "mixed": Way(gather=True, scatter=False),
    "pinned": Way(gather=False, scatter=False),
}
SLAB_BYTES = 256 << 20
ONE_BY_ONE = 60
SECONDS = 0.15


class Runs:
    """Batches of one layer on one engine."""

    def __init__(self, device: Device, layer: QuantizedLinear, roofline: Roofline | None) -> None:
        spec = layer.spec
        self.slab = Slab(capacity_bytes=SLAB_BYTES, largest_bytes=1 << 22)
        self.engine = GpuEngine(
            device=device, registry=LayerRegistry([layer]), slab=self.slab, roofline=roofline
        )
        self.key = BatchKey(spec.name, DType.F16, DType.F16)
        self.numbers = itertools.count(1)
        self.x = torch.randn(spec.k).half().numpy().tobytes()
        self.slot_bytes = 2 * max(spec.k, spec.n)

    def batch(self, rows: int) -> Batch:
        """Return a batch of one-row calls."""
        parts = []
        for _ in range(rows):
            slot = self.slab.acquire(self.slot_bytes)
            self.slab.view(slot)[: len(self.x)] = self.x
            item = WorkItem(
                sequence=next(self.numbers), key=self.key, rows=1, slot=slot, nbytes=len(self.x),
                enqueued_at=0.0,
            )  # fmt: skip
            parts.append(Part(item, 0, 1))
        return Batch(self.key, tuple(parts), rows)

    async def single(self, batch: Batch) -> dict[str, float]:
        """Return what one batch at a time takes, medians in seconds."""
        run = self.engine.run_lone if self.engine.is_lone(batch) else self.engine.run
        times: list[float] = []
        steps: dict[str, list[float]] = {}
        for number in range(ONE_BY_ONE + 10):
            begun = time.perf_counter_ns()
            result = await run(batch)
            took = time.perf_counter_ns() - begun
            if number >= 10:
                times.append(took / 1e9)
                for name, step in (("kernel", result.kernel_nanoseconds), *result.transfers):
                    steps.setdefault(name, []).append(step / 1e9)
        medians = {name: statistics.median(found) for name, found in steps.items()}
        total = statistics.median(times)
        return {"total": total, "added": total - medians["kernel"], **medians}

    async def rate(self, batches: list[Batch]) -> float:
        """Return the rows a second with all stages in use, results copied out as for callers."""
        begun = time.perf_counter()
        end = begun + SECONDS
        rows = 0

        async def keep_on(batch: Batch) -> None:
            nonlocal rows
            while time.perf_counter() < end:
                take_out(await self.engine.run(batch))
                rows += batch.rows

        await asyncio.gather(*map(keep_on, batches))
        return rows / (time.perf_counter() - begun)

    async def figures(self, rows: int, way: Way) -> dict[str, float]:
        """Return all of one size and way."""
        batches = [self.batch(rows) for _ in range(STAGES)]

        def forced(batch: Batched, mode: str) -> Way:
            return way  # every size, not only where it is chosen

        try:
            with mock.patch.object(gpu_engine, "way_of", forced):
                single = await self.single(batches[0])
                return {**single, "rows_per_second": await self.rate(batches)}
        finally:
            for part in itertools.chain.from_iterable(batch.parts for batch in batches):
                self.slab.release(part.item.slot)

    def stop(self) -> None:
        """End the threads and let go of the slab."""
        if not self.engine.stop(10):
            raise RuntimeError("a batch does not end")


def take_out(result: BatchResult) -> None:
    """Copy what lies in slots, as the ledger does before it gives them back."""
    if result.in_slots:
        for piece in result.rows:
            bytes(piece)


def compare(
    device: Device, layer: QuantizedLinear, sizes: tuple[int, ...], roofline: Roofline | None
) -> list[dict[str, Any]]:
    """Return the figures of every size and way for one layer."""
    runs = Runs(device, layer, roofline)
    try:
        return [
            {"rows": rows, "way": name, **asyncio.run(runs.figures(rows, way))}
            for rows in sizes
            if STAGES * rows * size_class(runs.slot_bytes) <= SLAB_BYTES
            for name, way in WAYS.items()
        ]
    finally:
        runs.stop()
