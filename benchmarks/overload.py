"""Three times what the engine can do, for a minute: what is answered, and how refusals feel.

The engine is slowed to some hundred calls a second, the front end is not. In six rounds a closed
loop says what the capacity is now, then calls come at a fixed rate whatever becomes of them. Both
processes may use all cores: on a busy machine a pinned front end would be what is overloaded.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from callers import matmul_request, unary
from figures import console, machine, print_facts, print_table, write_json
from processes import FOLDER, Others, ServerProcess, started
from random_model import MODEL, write_model

from qlinear.v1 import linear_pb2_grpc as pb_grpc

LAYER = f"{MODEL}/square"
FEATURES = 128
TIMES = 3.0
AGE_SECONDS = 1.0
BATCH_SECONDS = 0.024
IN_FLIGHT = 32
CONNECTIONS = 16
ROUNDS = 6
TURN_SECONDS = 0.001
PERCENTILES = ("p50", "p90", "p99")
TARGETS = {"goodput": 0.90, "refusal_p99_seconds": 0.005}


class Flood:
    """Calls at a fixed rate, and what became of each."""

    def __init__(self, stubs: Sequence[Any]) -> None:
        self._stubs = itertools.cycle(stubs)
        self._request = matmul_request(LAYER, 1, FEATURES)
        self.ends: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {"answered": [], "full": [], "too old": []}
        self.without_pushback = self.sent = 0
        self.late: list[float] = []
        """By how much this process, which sends, woke up late: what the machine adds to a time."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, rate: float, seconds: float) -> None:
        """Send for so long, and wait for the last."""
        started, sent = time.perf_counter(), 0
        while (passed := time.perf_counter() - started) < seconds:
            while sent < passed * rate:
                task = asyncio.create_task(self._call())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                sent += 1
            slept = time.perf_counter()
            await asyncio.sleep(TURN_SECONDS)
            self.late.append(time.perf_counter() - slept - TURN_SECONDS)
        await asyncio.gather(*self._tasks)
        self.sent += sent

    async def _call(self) -> None:
        begun = time.perf_counter()
        try:
            await next(self._stubs).MatMul(self._request, timeout=30)
            end = "answered"
        except grpc.aio.AioRpcError as error:
            end = error.code().name
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                end = "too old" if "max_queue_age" in (error.details() or "") else "full"
                keys = {key for key, _ in error.trailing_metadata() or ()}
                self.without_pushback += "grpc-retry-pushback-ms" not in keys
        self.ends[end] += 1
        self.seconds.setdefault(end, []).append(time.perf_counter() - begun)


async def answered_of_few(stub: Any, request: Any, seconds: float) -> int:
    """Return how many calls are answered to IN_FLIGHT callers that wait, in so many seconds.

    Where the machine stalls for as long as a call may wait, one is refused and sent again.
    """
    answered, end = 0, time.perf_counter() + seconds

    async def caller() -> None:
        nonlocal answered
        while time.perf_counter() < end:
            try:
                await stub.MatMul(request, timeout=30)
                answered += 1
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise

    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
    return answered


async def measure(server: ServerProcess, seconds: float) -> dict[str, Any]:
    """Return all figures."""
    async with AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]  # else all would share one connection
        memory = 0
        stubs = [
            pb_grpc.QuantizedLinearStub(
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(server.target, options=options)
                )
            )
            for _ in range(CONNECTIONS)
        ]
        request = matmul_request(LAYER, 1, FEATURES)
        for stub in stubs:
            await unary(stub, request, in_flight=1, seconds=0.05)
        pace = min(3.0, seconds / ROUNDS)
        flood, capacities, goodputs = Flood(stubs), [], []
        for number in range(ROUNDS):
            capacities.append(await answered_of_few(stubs[0], request, pace) / pace)
            memory = server.anonymous_bytes() if number == 1 else memory
            before = flood.ends["answered"]
            await flood.run(TIMES * capacities[-1], seconds / ROUNDS)
            answered = flood.ends["answered"] - before
            goodputs.append(answered / (seconds / ROUNDS) / capacities[-1])
    found = {name: np.asarray(values or [np.nan]) for name, values in flood.seconds.items()}
    return {
        "capacity_calls_per_second": statistics.median(capacities),
        "sent": flood.sent,
        "ends": dict(flood.ends),
        "without_pushback": flood.without_pushback,
        "goodput": statistics.median(goodputs),
        "goodputs": goodputs,
        "age_seconds": AGE_SECONDS,
        "answered_p50_seconds": float(np.percentile(found["answered"], 50)),
        "answered_p99_seconds": float(np.percentile(found["answered"], 99)),
        "refusal_p50_seconds": float(np.percentile(found["full"], 50)),
        "refusal_p90_seconds": float(np.percentile(found["full"], 90)),
        "refusal_p99_seconds": float(np.percentile(found["full"], 99)),
        "late_p90_seconds": float(np.percentile(flood.late, 90)),
        "late_p99_seconds": float(np.percentile(flood.late, 99)),
        "grown_bytes": server.anonymous_bytes() - memory,
    }


def seen_by_server(path: Path) -> dict[str, float]:
    """Return the percentiles of what the server wrote at its end."""
    seen = json.loads(path.read_text())
    return {
        f"server_{name}_{p}_seconds": float(np.percentile(seen[key] or [np.nan], int(p[1:])))
        for name, key in (("refusal", "refusals"), ("lag", "lags"))
        for p in PERCENTILES
    }


def show(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table."""
    out, f = console(json_to_stdout=args.json == "-"), report["overload"]
    ends = ", ".join(f"{count} {name}" for name, count in sorted(f["ends"].items()))
    rows = [
        ["capacity, calls/s", f"{f['capacity_calls_per_second']:.0f}", ""],
        [f"sent in {args.seconds:g} s", str(f["sent"]), f"{TIMES:g} x capacity"],
        ["ends", ends, "all of them: counts add up"],
        [
            "goodput over capacity, median of rounds",
            f"{f['goodput']:.2f} ({min(f['goodputs']):.2f} to {max(f['goodputs']):.2f})",
            f">= {TARGETS['goodput']}",
        ],
        [
            "answered after, ms (p50, p99)",
            f"{f['answered_p50_seconds'] * 1e3:.0f}, {f['answered_p99_seconds'] * 1e3:.0f}",
            f"<= {AGE_SECONDS * 1e3:.0f} and a batch",
        ],
        [
            "refused after, as the sender sees it, ms (p50, p90, p99)",
            ", ".join(f"{f[f'refusal_{p}_seconds'] * 1e3:.1f}" for p in PERCENTILES),
            "",
        ],
        [
            "this process woke up late by, ms (p90, p99)",
            f"{f['late_p90_seconds'] * 1e3:.1f}, {f['late_p99_seconds'] * 1e3:.1f}",
            "what the machine adds",
        ],
        [
            "the server's event loop was late by, ms (p50, p90, p99)",
            ", ".join(f"{f[f'server_lag_{p}_seconds'] * 1e3:.2f}" for p in PERCENTILES),
            "",
        ],
        [
            "refused by the server within, ms (p50, p90, p99)",
            ", ".join(f"{f[f'server_refusal_{p}_seconds'] * 1e3:.2f}" for p in PERCENTILES),
            f"< {TARGETS['refusal_p99_seconds'] * 1e3:.0f} with its lateness",
        ],
        ["refusals without a pause to keep", str(f["without_pushback"]), "0"],
        ["memory of the server grew by, MiB", f"{f['grown_bytes'] / 2**20:.1f}", ""],
    ]
    print_table(out, "a slowed engine and more calls than it can do", ["", "", "target"], rows)
    print_facts(out, report)


def main() -> None:
    parser = argparse.ArgumentParser(prog="qlinear bench overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload [60]")
    parser.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_model(folder, {"square": (FEATURES, FEATURES)})
        seen = folder / "seen.json"
        words = [str(FOLDER / "slow_server.py"), str(model), str(BATCH_SECONDS), str(AGE_SECONDS)]
        with started([*words, str(seen)], os.sched_getaffinity(0)) as server:
            others, own, used = Others(), time.process_time(), server.cpu_seconds()
            report: dict[str, Any] = {"overload": asyncio.run(measure(server, args.seconds))}
            used = server.cpu_seconds() - used + time.process_time() - own
            report["others_cores"] = others.cores(used)
        report["overload"] |= seen_by_server(seen)
    ends = report["overload"]["ends"]
    assert sum(ends.values()) == report["overload"]["sent"], "a call was lost"
    report["machine"] = machine()
    show(report, args)
    write_json(args.json, report)


if __name__ == "__main__":
    main()
