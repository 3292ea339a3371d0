"""The server's scheduler against FIFO and a fixed window, on simulated traffic.

Costs of batches come from a curve: that of 4096 x 28672 on an H200 (docs/performance.md, up to 64
rows, the last rate beyond), or one measured here and now (--measured). Loads are multiples of the
capacity at the sweet spot. Nothing is random between runs: the same command prints the same table.
"""

import argparse
import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from figures import console, machine, print_facts, print_table, write_json
from processes import Others
from simulation import Call, Fifo, Ours, Policy, Window, bursts, merged, poisson, simulate, spread

from qlinear_service.batcher import Batcher
from qlinear_service.batching import Batch, BatchKey, WorkItem, WorkQueue
from qlinear_service.cost import CostCurve, Steps
from qlinear_service.curves import HostStepper, measure_curves
from qlinear_service.dtypes import DType
from qlinear_service.gpu.made_up import made_up_layer
from qlinear_service.kernels.backends import load_kernels
from qlinear_service.kernels.library_cache import default_cache_dir
from qlinear_service.metrics import Metrics
from qlinear_service.results import BatchResult
from qlinear_service.scheduling import BATCH_SECONDS, pace_of
from qlinear_service.slots import Slot

H200 = {1: 21.6e-6, 8: 21.2e-6, 16: 26.0e-6, 32: 31.1e-6, 64: 37.6e-6}
MOST_ROWS = 1024
WINDOW_SECONDS = 1e-3
PREFILL_ROWS = 4096
CALLS = 20_000
"""Small calls of a trace."""


def traces(curve: CostCurve, calls: int) -> dict[str, list[Call]]:
    """Return the traces by name; each lasts as long as its calls take at capacity."""
    rate = curve.capacity_rows_per_second
    # A curve counts no batch's overhead: what can be offered is a little less.
    sweet = curve.sweet_spot_rows
    rate = sweet / (sweet / rate + BATCH_SECONDS)
    seconds = calls / rate
    half = poisson(rate / 2, 2 * seconds, 1, client="polite")
    greedy = [Call(at=0.0, client="greedy") for _ in range(calls // 2)]
    prefill = poisson(rate / 4 / PREFILL_ROWS, 2 * seconds, 3, rows=PREFILL_ROWS, client="prefill")
    prefill = prefill or [Call(at=seconds, rows=PREFILL_ROWS, client="prefill")]
    return {
        "poisson, 0.5 x capacity": half,
        "poisson, 1 x": poisson(rate, seconds, 2),
        "poisson, 2 x": poisson(2 * rate, seconds / 2, 2),
        "poisson, 1 x, 4 layers": spread(poisson(rate, seconds, 2), 4, 2),
        "bursts of 64, 0.5 x": bursts(rate / 2, 2 * seconds, 64, 4),
        "0.5 x, and one greedy client": merged(greedy, half),
        "0.5 x, and prefill": merged(prefill, half),
    }


def policies(curve: CostCurve) -> dict[str, Callable[[], Policy]]:
    """Return what is compared, by name."""
    pace = pace_of(curve, MOST_ROWS)
    return {
        "qlinear": lambda: Ours(pace),
        "fifo": lambda: Fifo(MOST_ROWS),
        "window 1 ms": lambda: Window(MOST_ROWS, WINDOW_SECONDS),
    }


def compare(curve: CostCurve, calls: int) -> list[dict[str, Any]]:
    """Return the figures of all policies on all traces; latencies are those of one-row calls."""

    def seconds_of(rows: int) -> float:
        return curve.seconds(rows) + BATCH_SECONDS

    def is_small(call: Call) -> bool:
        return call.rows == 1 and call.client != "greedy"

    rows = []
    for trace_name, trace in traces(curve, calls).items():
        for name, make in policies(curve).items():
            report = simulate(make(), trace, seconds_of)
            rows.append(
                {
                    "trace": trace_name,
                    "policy": name,
                    "calls": len(report.calls),
                    "p50_seconds": report.percentile(50, is_small),
                    "p99_seconds": report.percentile(99, is_small),
                    "rows_per_batch": report.rows_per_batch,
                    "rows_per_second": report.rows_per_second,
                }
            )
    return rows


def measured_curve(threads: int) -> CostCurve:
    """Return the curve of 4096 x 4096 on this machine's CPU."""
    kernels = load_kernels(
        cache_dir=default_cache_dir(), threads=threads, torch_only=False, stop=threading.Event()
    )
    layer = made_up_layer(
        n=4096, k=4096, bits=4, group_size=128, symmetric=True, scale_dtype=DType.F16,
        device=torch.device("cpu"),
    )  # fmt: skip
    stepper, stop = HostStepper(kernels), threading.Event()
    (curve,) = measure_curves(stepper, {"": [layer]}, most_seconds=10, stop=stop).values()
    return curve


async def batch_overhead(batches: int) -> dict[str, float]:
    """Return what batcher and queue take besides the computation: for a batch, and for a call."""

    async def run_batch(batch: Batch) -> BatchResult:
        return BatchResult([memoryview(b"")] * len(batch.parts), 0)

    loop, key = asyncio.get_running_loop(), BatchKey("m/a", DType.F16, DType.F16)
    queue = WorkQueue(max_batch_rows=MOST_ROWS, max_queue_rows=1 << 20, max_age_seconds=60)
    metrics = _no_metrics()
    batcher = Batcher(
        queue=queue, run_batch=run_batch, release=lambda item: None, clock=loop.time,
        metrics=metrics,
    )  # fmt: skip
    task = asyncio.create_task(batcher.run())
    number = 0

    async def once(calls: int) -> float:
        nonlocal number
        done = loop.create_future()
        left = calls

        def settle(answer: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                done.set_result(None)

        started = time.process_time()
        for _ in range(calls):
            number += 1
            item = WorkItem(
                sequence=number, key=key, rows=1, slot=Slot(0, 0), nbytes=1, enqueued_at=loop.time()
            )
            batcher.submit([item], settle)
        await done
        return time.process_time() - started

    lone = sorted([await once(1) for _ in range(batches)])[batches // 2]
    many = sorted([await once(64) for _ in range(batches)])[batches // 2]
    task.cancel()
    call = (many - lone) / 63
    return {"batch_seconds": lone - call, "call_seconds": call}


class _NoMetrics:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **more: None


def _no_metrics() -> Metrics:
    return _NoMetrics()  # type: ignore[return-value]


def show(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the tables."""
    out = console(json_to_stdout=args.json == "-")
    for name, found in report["curves"].items():
        rows = [
            [
                row["trace"] if row["policy"] == "qlinear" else "",
                row["policy"],
                f"{row['p50_seconds'] * 1e6:,.0f}",
                f"{row['p99_seconds'] * 1e6:,.0f}",
                f"{row['rows_per_batch']:.1f}",
                f"{row['rows_per_second']:,.0f}",
            ]
            for row in found["figures"]
        ]
        title = f"{name}: sweet spot {found['sweet_spot_rows']} rows, capacity "
        title += f"{found['capacity_rows_per_second']:,.0f} rows/s; latencies of one-row calls, µs"
        headings = ["", "", "p50", "p99", "rows/batch", "rows/s"]
        print_table(out, title, headings, rows)
    costs = report["overhead"]
    text = "batcher and queue: %.0f µs a batch and %.1f µs a call; assumed: %.0f µs a batch"
    figures = (1e6 * costs["batch_seconds"], 1e6 * costs["call_seconds"], 1e6 * BATCH_SECONDS)
    out.print(text % figures)
    print_facts(out, report)


def main() -> None:
    parser = argparse.ArgumentParser(prog="qlinear bench schedule", description=__doc__)
    parser.add_argument("--calls", type=int, default=CALLS, help=f"of a trace [{CALLS}]")
    parser.add_argument("--measured", action="store_true", help="also with this machine's costs")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU computation [1]")
    parser.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    args = parser.parse_args()
    others, own = Others(), time.process_time()
    steps = tuple(Steps(rows, 0.0, seconds, 0.0) for rows, seconds in H200.items())
    curves = {"4096 x 28672 on an H200": CostCurve(steps=steps)}
    if args.measured:
        curves["4096 x 4096 on this CPU"] = measured_curve(args.threads)
    report: dict[str, Any] = {
        "curves": {
            name: {
                "sweet_spot_rows": curve.sweet_spot_rows,
                "capacity_rows_per_second": curve.capacity_rows_per_second,
                "figures": compare(curve, args.calls),
            }
            for name, curve in curves.items()
        },
        "overhead": asyncio.run(batch_overhead(200)),
    }
    report["others_cores"] = others.cores(time.process_time() - own)
    report["machine"] = machine()
    show(report, args)
    write_json(args.json, report)


if __name__ == "__main__":
    main()
