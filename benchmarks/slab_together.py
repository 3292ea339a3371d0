"""Layers of one call as one on a GPU, against one by one: what `gpu/together.py` is there for.

Query, key and value, and gate and up, of a Llama-3-8B block unless told otherwise. Both ways in
turn, one call at a time: from its rows in the slab to all of its results.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from figures import print_table
from rich.console import Console

from qlinear_service.batching import Batch, BatchKey, Part, WorkItem
from qlinear_service.dtypes import DType
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.gpu.streams import Device
from qlinear_service.layers import LayerRegistry, QuantizedLinear
from qlinear_service.results import BatchResult
from qlinear_service.slots import Slab

ROWS = (1, 4, 8, 16, 32)
SLAB_BYTES = 64 << 20
TURNS = 200
WARM_TURNS = 20


class Group(NamedTuple):
    """Layers on one x."""

    k: int
    features: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> "Group":
        """Return what "KxN,N..." says."""
        k, _, features = text.partition("x")
        try:
            made = cls(int(k), tuple(map(int, features.split(","))))
        except ValueError:
            made = cls(0, ())
        if len(made.features) < 2:
            raise ValueError(f"{text!r} is no group of layers; expected KxN,N with two or more N")
        return made

    def __str__(self) -> str:
        return f"{self.k}x{','.join(map(str, self.features))}"


GROUPS = (Group(4096, (4096, 1024, 1024)), Group(4096, (14336, 14336)))


class _Calls:
    """One call for all layers, on an engine of its own."""

    def __init__(self, device: Device, layers: Sequence[QuantizedLinear]) -> None:
        self.slab = Slab(capacity_bytes=SLAB_BYTES, largest_bytes=1 << 22)
        self.engine = GpuEngine(device=device, registry=LayerRegistry(layers), slab=self.slab)
        self.layers = layers
        self.numbers = itertools.count(1)

    def batches(self, rows: int) -> list[Batch]:
        """Return a batch of each layer for one-row calls."""
        slots, k = [], self.layers[0].spec.k
        for _ in range(rows):
            data = torch.randn(k).half().numpy().tobytes()
            slots.append(self.slab.acquire(len(data), users=len(self.layers)))
            self.slab.view(slots[-1])[: len(data)] = data
        made = []
        for layer in self.layers:
            key = BatchKey(layer.spec.name, DType.F16, DType.F16)
            parts = tuple(
                Part(
                    WorkItem(
                        sequence=next(self.numbers), key=key, rows=1, slot=slot, nbytes=2 * k,
                        enqueued_at=0.0,
                    ), 0, 1,
                )
                for slot in slots
            )  # fmt: skip
            made.append(Batch(key, parts, rows))
        return made

    def release(self, batches: Sequence[Batch]) -> None:
        """Give the slots back."""
        for part in itertools.chain.from_iterable(batch.parts for batch in batches):
            self.slab.release(part.item.slot)

    async def one_by_one(self, batches: Sequence[Batch]) -> list[BatchResult]:
        """Send them right behind each other, as layers that do not go together are."""
        return await asyncio.gather(*map(self.engine.run, batches))

    async def figures(self, rows: int) -> dict[str, Any]:
        """Return medians in seconds, of the whole and of the products, and their ratio."""
        batches = self.batches(rows)
        if not self.engine.goes_together(batches):
            raise RuntimeError(f"{rows} rows of these layers do not go together")
        ways = {"together": self.engine.run_together, "one_by_one": self.one_by_one}
        took: dict[str, list[float]] = {name: [] for name in ways}
        kernels: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(WARM_TURNS + TURNS):
            for name, run in ways.items():
                begun = time.perf_counter_ns()
                results = await run(batches)
                seconds = (time.perf_counter_ns() - begun) / 1e9
                if turn >= WARM_TURNS:
                    took[name].append(seconds)
                    kernels[name].append(sum(one.kernel_nanoseconds for one in results) / 1e9)
        self.release(batches)
        medians = {name: statistics.median(found) for name, found in took.items()}
        return {
            "rows": rows,
            **{f"{name}_seconds": found for name, found in medians.items()},
            **{f"{name}_kernel_seconds": statistics.median(kernels[name]) for name in ways},
            "ratio": medians["together"] / medians["one_by_one"],
        }


def compare_together(
    device: Device, layers: Sequence[QuantizedLinear], sizes: Sequence[int] = ROWS
) -> list[dict[str, Any]]:
    """Return the figures of each number of rows for layers with names of their own."""
    calls = _Calls(device, layers)
    try:
        return [asyncio.run(calls.figures(rows)) for rows in sizes]
    finally:
        if not calls.engine.stop(10):
            raise RuntimeError("a batch does not end")


def print_together(out: Console, group: str, figures: Sequence[dict[str, Any]]) -> None:
    """Print both ways beside each other."""
    names = ("together", "one_by_one", "together_kernel", "one_by_one_kernel")
    rows = [
        [
            str(found["rows"]),
            *(f"{1e6 * found[f'{name}_seconds']:.1f}" for name in names),
            f"{found['ratio']:.2f}",
        ]
        for found in figures
    ]
    title = f"{group} (k x n of each layer): one call at a time, µs from slab to all results"
    heads = [
        "rows",
        "as one",
        "one by one",
        "products",
        "products one by one",
        "as one / one by one",
    ]
    print_table(out, title, heads, rows)
