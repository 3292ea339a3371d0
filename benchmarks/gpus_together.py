"""Several GPUs of one host, against one: batches of a layer that are shared out, or go to each.

Without gRPC: rows lie in the slab, and an engine computes them. What a batch takes alone, from its
rows to its results; its kernel, of several the slowest; batches and rows a second with as many in
flight as the engine takes. Each batch has rows of its own, in one slot. Needs the GPUs.
"""

import argparse
import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from figures import console, machine, print_facts, print_table, write_json
from processes import Others
from slab_place import use_library

from qlinear_service.batching import Batch, BatchKey, Part, WorkItem
from qlinear_service.config import DEVICE_MODES, KernelConfig, ServiceConfig
from qlinear_service.dtypes import DType
from qlinear_service.engine import BatchRunner, WorkerThread
from qlinear_service.gpu.loading import GpuPlace
from qlinear_service.gpu.made_up import made_up_layer
from qlinear_service.gpu.places import GpuPlaces
from qlinear_service.layers import LayerRegistry
from qlinear_service.loaded import Loaded
from qlinear_service.loading import Place
from qlinear_service.runners import new_runner
from qlinear_service.slots import Slab

SHAPES = ("4096x28672", "8192x28672", "4096x4096")
ROWS = (1, 16, 32, 128, 512)
MODES = ("one", *DEVICE_MODES)
SLAB_BYTES = 1 << 30
LONE_BATCHES = 100

PlaceOf = Callable[[KernelConfig], Place]


def place_of(config: KernelConfig) -> Place:
    """Return where layers are put: one GPU or several."""
    kind = GpuPlaces if len(config.device_names) > 1 else GpuPlace
    return kind(config, threading.Event())


class Bench:
    """One layer where a configuration says, and an engine over it."""

    def __init__(self, place: Place, config: KernelConfig, k: int, n: int) -> None:
        layer = made_up_layer(
            n=n, k=k, bits=4, group_size=128, symmetric=True, scale_dtype=DType.F16,
            device=torch.device("cpu"),
        )  # fmt: skip
        with place.filling() as put:
            registry = LayerRegistry([put(layer)])
        loaded = Loaded(
            registry=registry,
            kernels=place.kernels,
            roofline=place.probe(),
            gpu=place.device,
            replicas=place.replicas(),
        )
        self.slab = Slab(capacity_bytes=SLAB_BYTES, largest_bytes=1 << 27)
        self.worker = WorkerThread("engine")
        service = ServiceConfig(kernels=config)
        self.runner: BatchRunner = new_runner(loaded, service, self.slab, self.worker)
        self.key = BatchKey(layer.spec.name, DType.F16, DType.F16)
        self.k, self.n = k, n
        self.numbers = itertools.count(1)

    def batch(self, rows: int) -> Batch:
        """Put rows into a slot that has room for their results."""
        nbytes = 2 * rows * self.k
        slot = self.slab.acquire(2 * rows * max(self.k, self.n))
        self.slab.view(slot)[:nbytes] = bytes(nbytes)
        item = WorkItem(
            sequence=next(self.numbers), key=self.key, rows=rows, slot=slot, nbytes=nbytes,
            enqueued_at=0.0,
        )  # fmt: skip
        return Batch(self.key, (Part(item, 0, rows),), rows)

    async def alone(self, rows: int) -> dict[str, float]:
        """Return what one batch at a time takes, medians."""
        took, kernels = [], []
        for number in range(LONE_BATCHES):
            batch = self.batch(rows)
            run = self.runner.run_lone if self.runner.is_lone(batch) else self.runner.run
            begun = time.perf_counter()
            result = await run(batch)
            if number >= LONE_BATCHES // 5:  # those before it warm up
                took.append(time.perf_counter() - begun)
                kernels.append(result.kernel_nanoseconds / 1e9)
            self.slab.release(batch.parts[0].item.slot)
        return {
            "batch_seconds": statistics.median(took),
            "kernel_seconds": statistics.median(kernels),
        }

    async def together(self, rows: int, seconds: float) -> float:
        """Return batches a second with as many in flight as there may be."""
        end, done = time.perf_counter() + seconds, 0

        async def work() -> None:
            nonlocal done
            while time.perf_counter() < end:
                batch = self.batch(rows)
                await self.runner.run(batch)
                self.slab.release(batch.parts[0].item.slot)
                done += 1

        begun = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(self.runner.most_in_flight)))
        return done / (time.perf_counter() - begun)

    def close(self) -> None:
        """End all threads."""
        self.runner.stop(5)
        self.worker.stop(5)


async def measure(bench: Bench, rows: int, seconds: float) -> dict[str, float]:
    """Return all figures of batches of so many rows."""
    alone = await bench.alone(rows)
    rate = await bench.together(rows, seconds)
    return {**alone, "batches_per_second": rate, "rows_per_second": rate * rows}


def figures_of(args: argparse.Namespace, make: PlaceOf = place_of) -> list[dict[str, Any]]:
    """Return the figures of every mode, shape and number of rows."""
    found = []
    first = args.devices.partition(",")[0]
    for mode in args.modes:
        config = KernelConfig(device=f"cuda:{first}")
        if mode != "one":
            config = KernelConfig(devices=args.devices, device_mode=mode)
        for shape in args.shapes:
            k, n = map(int, shape.split("x"))
            bench = Bench(make(config), config, k, n)
            for rows in args.rows:
                figures = asyncio.run(measure(bench, rows, args.seconds))
                found.append({"shape": shape, "rows": rows, "mode": mode, **figures})
            bench.close()
    return sorted(found, key=lambda one: (args.shapes.index(one["shape"]), one["rows"]))


def row_of(one: dict[str, Any], base: dict[str, Any] | None) -> list[str]:
    """Return a line of the table; beside what one GPU does, if that was measured."""
    speed = "" if base is None else f"{one['rows_per_second'] / base['rows_per_second']:.2f} x"
    return [
        f"{one['shape']} m={one['rows']} {one['mode']}",
        f"{1e6 * one['batch_seconds']:.1f}",
        f"{1e6 * one['kernel_seconds']:.1f}",
        f"{one['batches_per_second']:,.0f}",
        f"{one['rows_per_second']:,.0f}",
        speed,
    ]


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    made = argparse.ArgumentParser(prog="qlinear bench gpus", description=__doc__)
    made.add_argument("--devices", default="0,1", metavar="N,N", help="GPUs of one kind [0,1]")
    made.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="[all]")
    made.add_argument(
        "--shapes", nargs="+", default=SHAPES, metavar="KxN", help=f"[{' '.join(SHAPES)}]"
    )
    made.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of x [1 16 32 128 512]")
    made.add_argument("--seconds", type=float, default=0.5, help="with batches in flight [0.5]")
    made.add_argument("--library", type=Path, metavar="FILE", help="GPU kernels, built elsewhere")
    made.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    return made


def main() -> None:
    args = parser().parse_args()
    if args.library is not None:
        use_library(args.library)
    others, own = Others(), time.process_time()
    report: dict[str, Any] = {"gpus": figures_of(args)}
    report["others_cores"] = others.cores(time.process_time() - own)
    report["machine"] = machine()
    out = console(json_to_stdout=args.json == "-")
    bases = {(one["shape"], one["rows"]): one for one in report["gpus"] if one["mode"] == "one"}
    lines = [row_of(one, bases.get((one["shape"], one["rows"]))) for one in report["gpus"]]
    names = ["k x n, rows, mode", "batch µs", "kernel µs", "batches/s", "rows/s", "one GPU"]
    print_table(out, f"GPUs {args.devices}", names, lines)
    print_facts(out, report)
    write_json(args.json, report)


if __name__ == "__main__":
    main()
