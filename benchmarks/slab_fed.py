"""The batcher fed from the slab, without gRPC: what it makes of 0.2 to 2 x the engine's capacity.

One layer, one row a request. Capacity is that of the measured cost curve: the sweet spot over its
cost. Also what a lone request takes beyond its kernel, from its row in the slab to its result.
On a CPU requests come from this very process and thread. On a GPU the server's dispatcher is fed by
a native thread (slab_native.py), each of --variants in turn, and by Python for the lone request;
each spins, and wants a core for itself. First come both ways across the bus for batches of 1 to
1024 rows, of each of --shapes, and layers of one call as one against one by one (--groups).
"""

import argparse
import asyncio
import functools
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from figures import console, machine, print_facts, write_json
from processes import Others
from slab_native import measure_native
from slab_place import layer_of, load, place_of
from slab_report import print_loads, print_native, print_ways
from slab_together import GROUPS, Group, compare_together, print_together
from slab_variant import FORM, STANDARD, Variant
from slab_ways import ROWS, compare

from qlinear_service.batching import BatchKey, WorkItem
from qlinear_service.config import (
    NATIVE,
    PYTHON,
    BatchingConfig,
    KernelConfig,
    LimitsConfig,
    ServiceConfig,
)
from qlinear_service.dtypes import DType
from qlinear_service.engine import WorkerThread
from qlinear_service.errors import Overloaded
from qlinear_service.loaded import Loaded
from qlinear_service.process import collect_rarely
from qlinear_service.results import Answer
from qlinear_service.runners import new_batching
from qlinear_service.slots import Slab

SHAPES = ("4096x28672", "4096x4096", "14336x4096", "8192x8192")
LOADS = (0.2, 0.5, 0.8, 1.0, 1.5, 2.0)
SLAB_BYTES = 1 << 30
LONE_CALLS = 300
MOST_WAITING = 20_000


class _BatchRows:
    """Metrics that only remember how large batches were."""

    def __init__(self) -> None:
        self.batch_rows: list[int] = []

    def batch_finished(self, layer: str, *, rows: int, **more: Any) -> None:
        self.batch_rows.append(rows)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: None


def _settle(done: "asyncio.Future[tuple[Answer, int]]", answer: Answer) -> None:
    done.set_result((answer, time.perf_counter_ns()))


class Feed:
    """A batcher over a real engine, as the server makes it, and requests put into its slab."""

    def __init__(self, loaded: Loaded) -> None:
        self.slab = Slab(capacity_bytes=SLAB_BYTES, largest_bytes=1 << 20)
        self.worker = WorkerThread("engine")
        device = "cpu" if loaded.gpu is None else "cuda:0"
        limits = LimitsConfig(
            max_queue_rows=MOST_WAITING, max_request_rows=1, max_queue_age_seconds=60
        )
        batching = BatchingConfig(dispatcher=PYTHON if loaded.gpu is None else NATIVE)
        config = ServiceConfig(
            kernels=KernelConfig(device=device), limits=limits, batching=batching
        )
        (layer,) = loaded.registry
        k = layer.spec.k
        self.slot_bytes = 2 * max(k, layer.spec.n)
        self.key = BatchKey(layer.spec.name, DType.F16, DType.F16)
        self.row = torch.randn(k).half().numpy().data.cast("B")
        self.numbers = itertools.count(1)
        self.loop = asyncio.get_running_loop()
        self.metrics = _BatchRows()
        self.batching = new_batching(
            loaded,
            config,
            self.slab,
            self.worker,
            clock=self.loop.time,
            metrics=self.metrics,  # type: ignore[arg-type]
        )
        self.batcher = self.batching.batcher
        self.task = asyncio.create_task(self.batcher.run())

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
            self.batcher.submit([item], functools.partial(_settle, done))
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
        self.metrics.batch_rows.clear()
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
            "rows_per_batch": statistics.mean(self.metrics.batch_rows),
        }

    async def close(self) -> None:
        """End all threads."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.batching.stop(5)
        self.worker.stop(5)


async def measure(loaded: Loaded, loads: Sequence[float], seconds: float) -> dict[str, Any]:
    """Return all figures of a batcher that this process feeds."""
    (curve,) = loaded.curves.values()
    feed = Feed(loaded)
    await feed.lone()
    lone = await feed.lone()
    capacity = curve.capacity_rows_per_second
    offered = [{"load": load, **await feed.offer(load * capacity, seconds)} for load in loads]
    await feed.close()
    return {
        "sweet_spot_rows": curve.sweet_spot_rows,
        "capacity_rows_per_second": capacity,
        "costs": dict(zip(curve.rows, curve.costs, strict=True)),
        "lone": lone,
        "loads": offered,
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
        "--variants",
        type=Variant.read,
        nargs="+",
        default=(STANDARD,),
        metavar=FORM,
        help="of a GPU: batches in flight, multiprocessors that products leave to the kernels that "
        "move rows [0], whether those go first, how many blocks they have [SPARE; 0: as many as "
        "they take], whether two threads spin, one to send batches and one to see how they end, "
        "whether but one batch in eight is timed and long results go out by the copy engine, "
        "whether products take two streams in turn "
        "[as the server]",
    )
    made.add_argument(
        "--shapes",
        nargs="*",
        default=SHAPES,
        metavar="KxN",
        help=f"to compare ways with [{' '.join(SHAPES)}]",
    )
    made.add_argument(
        "--rows", type=int, nargs="+", default=ROWS, help="of batches to compare ways with"
    )
    made.add_argument(
        "--groups",
        type=Group.read,
        nargs="*",
        default=GROUPS,
        metavar="KxN,N",
        help=f"layers of one call on a GPU [{' '.join(map(str, GROUPS))}]",
    )
    made.add_argument("--library", type=Path, metavar="FILE", help="GPU kernels, built elsewhere")
    made.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    return made


def main() -> None:
    args = parser().parse_args()
    others, own = Others(), time.process_time()
    place = place_of(args.device, args.library)
    collect_rarely()  # as the server does
    report: dict[str, Any] = {"ways": {}, "together": {}, "slab": [], "native": []}
    where, has_gpu = f"{args.k} x {args.n} on {args.device}", place.device is not None
    if place.device is not None:
        for shape in args.shapes:
            k, n = map(int, shape.split("x"))
            layer = layer_of(args.device, k, n)
            report["ways"][shape] = compare(place.device, layer, args.rows, place.probe())
        for group in args.groups:
            layers = [
                layer_of(args.device, group.k, n, str(i)) for i, n in enumerate(group.features)
            ]
            report["together"][str(group)] = compare_together(place.device, layers)
    loaded = load(place, args.device, args.k, args.n)
    if has_gpu:
        report["native"] = [
            measure_native(loaded, args.loads, args.seconds, variant) for variant in args.variants
        ]
    loads = () if has_gpu else args.loads
    report["slab"].append(asyncio.run(measure(loaded, loads, args.seconds)))
    report["others_cores"] = others.cores(time.process_time() - own)
    report["machine"] = machine()
    out = console(json_to_stdout=args.json == "-")
    for shape, figures in report["ways"].items():
        print_ways(out, shape, figures)
    for group, figures in report["together"].items():
        print_together(out, group, figures)
    for found in report["native"]:
        print_native(out, where, found)
    for found in report["slab"]:
        print_loads(out, where, found)
    print_facts(out, report)
    write_json(args.json, report)


if __name__ == "__main__":
    main()
