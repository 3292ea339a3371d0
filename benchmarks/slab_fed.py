"""The batcher fed from the slab, without gRPC: what it makes of 0.2 to 2 x the engine's capacity.

One layer, one row a request. Capacity is that of the measured cost curve: the sweet spot over its
cost. Also what a lone request takes beyond its kernel, from its row in the slab to its result.
Requests come from this very process, so a capacity of more than about 100,000 rows a second is
offered as far as Python can: the table says what was. It spins, and wants a core for itself.
On a GPU first both ways across the bus for batches of 1 to 1024 rows, of each of --shapes.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from figures import console, machine, print_facts, write_json
from processes import Others
from slab_place import layer_of, load, place_of
from slab_report import print_loads, print_ways
from slab_ways import ROWS, compare

from qlinear_service.batcher import Batcher
from qlinear_service.batching import BatchKey, WorkItem, WorkQueue
from qlinear_service.config import TRANSFERS, KernelConfig, ServiceConfig
from qlinear_service.dtypes import DType
from qlinear_service.engine import WorkerThread
from qlinear_service.errors import Overloaded
from qlinear_service.loaded import Loaded
from qlinear_service.process import collect_rarely
from qlinear_service.results import Answer, BatchResult
from qlinear_service.runners import new_runner, paces_of
from qlinear_service.slots import Slab

SHAPES = ("4096x28672", "4096x4096", "14336x4096", "8192x8192")
LOADS = (0.2, 0.5, 0.8, 1.0, 1.5, 2.0)
SLAB_BYTES = 1 << 30
LONE_CALLS = 300
MOST_WAITING = 20_000


class _NoMetrics:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: None


class Feed:
    """A batcher over a real engine, and requests that are put into its slab."""

    def __init__(self, loaded: Loaded, transfers: str) -> None:
        self.slab = Slab(capacity_bytes=SLAB_BYTES, largest_bytes=1 << 20)
        self.worker = WorkerThread("engine")
        config = ServiceConfig(kernels=KernelConfig(transfers=transfers))
        self.runner = new_runner(loaded, config, self.slab, self.worker)
        (layer,) = loaded.registry
        k = layer.spec.k
        self.slot_bytes = 2 * max(k, layer.spec.n)
        self.key = BatchKey(layer.spec.name, DType.F16, DType.F16)
        self.row = memoryview(torch.randn(k).half().numpy()).cast("B")
        self.numbers = itertools.count(1)
        self.batch_rows: list[int] = []
        self.loop = asyncio.get_running_loop()
        most_rows = config.batching.max_batch_rows
        queue = WorkQueue(
            max_batch_rows=most_rows,
            max_queue_rows=MOST_WAITING,
            max_age_seconds=60,
            paces=paces_of(loaded, most_rows),
        )
        self.batcher = Batcher(
            queue=queue,
            run_batch=self._run,
            release=lambda item: self.slab.release(item.slot),
            clock=self.loop.time,
            metrics=_NoMetrics(),  # type: ignore[arg-type]
            most_running=self.runner.most_in_flight,
            run_lone=self._run_lone,
            is_lone=self.runner.is_lone,
            most_chained=self.runner.most_chained,
        )
        self.task = asyncio.create_task(self.batcher.run())

    async def _run(self, batch: Any) -> BatchResult:
        self.batch_rows.append(batch.rows)
        return await self.runner.run(batch)

    async def _run_lone(self, batch: Any) -> BatchResult:
        self.batch_rows.append(batch.rows)
        return await self.runner.run_lone(batch)

    def send(self, settle: Any) -> None:
        """Put one row into the slab and queue it."""
        self.batcher.submit([self.item()], settle)

    def item(self) -> WorkItem:
        """Put one row into the slab."""
        slot = self.slab.acquire(self.slot_bytes)
        self.slab.view(slot)[: len(self.row)] = self.row
        return WorkItem(
            sequence=next(self.numbers), key=self.key, rows=1, slot=slot, nbytes=len(self.row),
            enqueued_at=self.loop.time(),
        )  # fmt: skip

    async def lone(self) -> dict[str, float]:
        """Return what one request at a time takes, from its row in the slab on, medians.

        To its result, and to the turn of whoever waits for it.
        """
        totals, added, told = [], [], []
        for _ in range(LONE_CALLS):
            done: asyncio.Future[tuple[Answer, int]] = self.loop.create_future()
            item = self.item()
            begun = time.perf_counter_ns()
            self.batcher.submit(
                [item], lambda answer, to=done: to.set_result((answer, time.perf_counter_ns()))
            )
            answer, settled = await done
            told.append((time.perf_counter_ns() - begun) / 1e9)
            if not isinstance(answer, list):
                raise answer
            totals.append((settled - begun) / 1e9)
            added.append((settled - begun - answer[0].kernel_nanoseconds) / 1e9)
        figures = {"total": totals, "added": added, "told": told}
        return {f"{name}_seconds": statistics.median(found) for name, found in figures.items()}

    async def offer(self, rate: float, seconds: float) -> dict[str, float]:
        """Offer `rate` requests a second for so long, and wait for those that were let in."""
        self.batch_rows.clear()
        answered = sent = refused = 0

        def settle(answer: Answer) -> None:
            nonlocal answered
            answered += isinstance(answer, list)

        begun = time.perf_counter()
        while (passed := time.perf_counter() - begun) < seconds:
            while sent < passed * rate:
                sent += 1
                try:
                    self.send(settle)
                except Overloaded:
                    refused += 1
                if sent % 64 == 0:
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
        in_time, offered = answered, sent / passed
        while self.batcher.items_held:
            await asyncio.sleep(0.001)
        return {
            "asked": rate,
            "offered": offered,
            "answered": in_time / passed,
            "refused": refused / passed,
            "rows_per_batch": statistics.mean(self.batch_rows),
        }

    async def close(self) -> None:
        """End all threads."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.runner.stop(5)
        self.worker.stop(5)


async def measure(loaded: Loaded, args: argparse.Namespace, transfers: str) -> dict[str, Any]:
    """Return all figures of one way."""
    (curve,) = loaded.curves.values()
    feed = Feed(loaded, transfers)
    await feed.lone()
    lone = await feed.lone()
    capacity = curve.capacity_rows_per_second
    loads = [
        {"load": load, **await feed.offer(load * capacity, args.seconds)} for load in args.loads
    ]
    await feed.close()
    return {
        "transfers": transfers,
        "sweet_spot_rows": curve.sweet_spot_rows,
        "capacity_rows_per_second": capacity,
        "costs": dict(zip(curve.rows, curve.costs, strict=True)),
        "lone": lone,
        "loads": loads,
    }


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    made = argparse.ArgumentParser(prog="qlinear bench slab", description=__doc__)
    made.add_argument("--device", default="cpu", help="cpu or cuda:N [cpu]")
    made.add_argument("--k", type=int, default=4096, help="input features [4096]")
    made.add_argument("--n", type=int, default=28672, help="output features [28672]")
    made.add_argument("--seconds", type=float, default=3.0, help="of each load [3]")
    made.add_argument("--loads", type=float, nargs="+", default=LOADS, help="x capacity")
    made.add_argument(
        "--transfers", nargs="+", choices=TRANSFERS, default=TRANSFERS, help="ways to feed it [all]"
    )
    made.add_argument(
        "--shapes",
        nargs="*",
        default=SHAPES,
        metavar="KxN",
        help="to compare ways with [%(default)s]",
    )
    made.add_argument(
        "--rows", type=int, nargs="+", default=ROWS, help="of batches to compare ways with"
    )
    made.add_argument("--library", type=Path, metavar="FILE", help="GPU kernels, built elsewhere")
    made.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    return made


def main() -> None:
    args = parser().parse_args()
    others, own = Others(), time.process_time()
    place = place_of(args.device, args.library)
    collect_rarely()  # as the server does
    report: dict[str, Any] = {"ways": {}, "slab": []}
    if place.device is not None:
        for shape in args.shapes:
            k, n = map(int, shape.split("x"))
            layer = layer_of(args.device, k, n)
            report["ways"][shape] = compare(place.device, layer, args.rows, place.probe())
    for transfers in args.transfers if place.device is not None else ("auto",):
        loaded = load(place, args.device, args.k, args.n, transfers)
        report["slab"].append(asyncio.run(measure(loaded, args, transfers)))
    report["others_cores"] = others.cores(time.process_time() - own)
    report["machine"] = machine()
    out = console(json_to_stdout=args.json == "-")
    for shape, figures in report["ways"].items():
        print_ways(out, shape, figures)
    for found in report["slab"]:
        print_loads(out, f"{args.k} x {args.n} on {args.device}", found)
    print_facts(out, report)
    write_json(args.json, report)


if __name__ == "__main__":
    main()
