"""The batcher fed from the slab, without gRPC: what it makes of 0.2 to 2 x the engine's capacity.

One layer, one row a request. Capacity is that of the measured cost curve: the sweet spot over its
cost. Also what a lone request takes beyond its kernel, from its row in the slab to its result.
Requests come from this very process, so a capacity of more than about 100,000 rows a second is
offered as far as Python can: the table says what was. It spins, and wants a core for itself.
"""

import argparse
import asyncio
import itertools
import statistics
import threading
import time
from typing import Any

import torch
from figures import console, machine, print_facts, print_table, write_json
from processes import Others

from qlinear_service.batcher import Batcher
from qlinear_service.batching import BatchKey, WorkItem, WorkQueue
from qlinear_service.config import KernelConfig, ServiceConfig
from qlinear_service.curves import HostStepper, measure_curves
from qlinear_service.dtypes import DType
from qlinear_service.engine import WorkerThread
from qlinear_service.errors import Overloaded
from qlinear_service.gpu.loading import GpuPlace
from qlinear_service.gpu.made_up import made_up_layer
from qlinear_service.gpu.stepper import DeviceStepper
from qlinear_service.layers import LayerRegistry
from qlinear_service.loaded import Loaded
from qlinear_service.loading import HostPlace
from qlinear_service.results import Answer, BatchResult
from qlinear_service.runners import new_runner, paces_of
from qlinear_service.slots import Slab

LOADS = (0.2, 0.5, 0.8, 1.0, 1.5, 2.0)
SLAB_BYTES = 1 << 30
LONE_CALLS = 300
MOST_WAITING = 20_000


class _NoMetrics:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: None


class Feed:
    """A batcher over a real engine, and requests that are put into its slab."""

    def __init__(self, loaded: Loaded, k: int) -> None:
        self.slab = Slab(capacity_bytes=SLAB_BYTES, largest_bytes=1 << 20)
        self.worker = WorkerThread("engine")
        config = ServiceConfig()
        self.runner = new_runner(loaded, config, self.slab, self.worker)
        (layer,) = loaded.registry
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
        )
        self.task = asyncio.create_task(self.batcher.run())

    async def _run(self, batch: Any) -> BatchResult:
        self.batch_rows.append(batch.rows)
        return await self.runner.run(batch)

    def send(self, settle: Any) -> None:
        """Put one row into the slab and queue it."""
        slot = self.slab.acquire(len(self.row))
        self.slab.view(slot)[: len(self.row)] = self.row
        item = WorkItem(
            sequence=next(self.numbers), key=self.key, rows=1, slot=slot, nbytes=len(self.row),
            enqueued_at=self.loop.time(),
        )  # fmt: skip
        self.batcher.submit([item], settle)

    async def lone(self) -> dict[str, float]:
        """Return what one request at a time takes, medians."""
        totals, added = [], []
        for _ in range(LONE_CALLS):
            done: asyncio.Future[Answer] = self.loop.create_future()
            begun = time.perf_counter_ns()
            self.send(done.set_result)
            answer = await done
            total = time.perf_counter_ns() - begun
            assert isinstance(answer, list), answer
            totals.append(total / 1e9)
            added.append((total - answer[0].kernel_nanoseconds) / 1e9)
        return {
            "total_seconds": statistics.median(totals),
            "added_seconds": statistics.median(added),
        }

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


def load(args: argparse.Namespace) -> Loaded:
    """Return one made-up layer on the device, and its curve."""
    config, stop = KernelConfig(device=args.device), threading.Event()
    place = (HostPlace if args.device == "cpu" else GpuPlace)(config, stop)
    layer = made_up_layer(
        n=args.n, k=args.k, bits=4, group_size=128, symmetric=True, scale_dtype=DType.F16,
        device=torch.device(args.device),
    )  # fmt: skip
    stepper = HostStepper(place.kernels) if place.device is None else DeviceStepper(place.device)
    shape = layer.spec.shape
    curves = measure_curves(stepper, {shape: [layer]}, most_seconds=10, stop=stop)
    return Loaded(
        registry=LayerRegistry([layer]), kernels=place.kernels, gpu=place.device, curves=curves
    )


async def measure(loaded: Loaded, args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    (curve,) = loaded.curves.values()
    feed = Feed(loaded, args.k)
    await feed.lone()
    lone = await feed.lone()
    capacity = curve.capacity_rows_per_second
    loads = [
        {"load": load, **await feed.offer(load * capacity, args.seconds)} for load in args.loads
    ]
    await feed.close()
    return {
        "sweet_spot_rows": curve.sweet_spot_rows,
        "capacity_rows_per_second": capacity,
        "costs": dict(zip(curve.rows, curve.costs, strict=True)),
        "lone": lone,
        "loads": loads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="qlinear bench slab", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N [cpu]")
    parser.add_argument("--k", type=int, default=4096, help="input features [4096]")
    parser.add_argument("--n", type=int, default=28672, help="output features [28672]")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load [3]")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="x capacity")
    parser.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    args = parser.parse_args()
    others, own = Others(), time.process_time()
    report: dict[str, Any] = {"slab": asyncio.run(measure(load(args), args))}
    report["others_cores"] = others.cores(time.process_time() - own)
    report["machine"] = machine()
    out, found = console(json_to_stdout=args.json == "-"), report["slab"]
    title = f"{args.k} x {args.n} on {args.device}: sweet spot {found['sweet_spot_rows']} rows, "
    title += f"capacity {found['capacity_rows_per_second']:,.0f} rows/s; a lone request takes "
    title += f"{found['lone']['total_seconds'] * 1e6:.0f} µs, "
    title += f"{found['lone']['added_seconds'] * 1e6:.0f} beyond its kernel"
    rows = [
        [
            f"{row['load']:g} x",
            *(f"{row[name]:,.0f}" for name in ("asked", "offered", "answered", "refused")),
            f"{row['rows_per_batch']:.1f}",
        ]
        for row in found["loads"]
    ]
    names = ["load", "asked", "offered", "answered", "refused", "rows/batch"]
    print_table(out, title, names, rows)
    print_facts(out, report)
    write_json(args.json, report)


if __name__ == "__main__":
    main()
