"""Processor time of a call: qlinear's server against a bare grpc.aio echo of the same bytes.

A 384x384 layer, one float16 row per call, 64 in flight. Servers run on one core, this program on
the others; runs of all servers and transports alternate, and medians are compared. Processor time
is user and system time of the whole process, so a busy machine changes it little.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from callers import Loop, matmul_request, serves_stream, stream, unary
from client_costs import measure_client
from figures import console, machine, print_facts, print_table, ratio, verdict, write_json
from processes import (
    Others,
    ServerProcess,
    core_split,
    echo_words,
    on_cores,
    qlinear_words,
    started,
)
from random_model import MODEL, write_model

from qlinear.v1 import linear_pb2_grpc as pb_grpc

MOST_RATIO = 1.6
LAYER = f"{MODEL}/square"
FEATURES = 384
IN_FLIGHT = 64
WARMUP_SECONDS = 0.5
LATENCY_RUNS = 3

Drive = Callable[..., Awaitable[Loop]]


@dataclass(frozen=True)
class Case:
    """One server, one transport, one number of calls in flight."""

    server: str
    transport: str
    in_flight: int


@dataclass(frozen=True)
class Run:
    """One run of one case."""

    cpu_seconds: float
    """Of the server, for one call."""
    loop: Loop


class Bench:
    """Both servers and a channel to each."""

    def __init__(self, servers: dict[str, ServerProcess], seconds: float) -> None:
        self._servers = servers
        self._seconds = seconds
        self._request = matmul_request(LAYER, 1, FEATURES)
        self._drives: dict[str, Drive] = {"unary": unary, "stream": stream}
        self._stubs: dict[str, Any] = {}
        self._channels: list[grpc.aio.Channel] = []

    async def open(self) -> list[str]:
        """Connect, warm everything up, and return the transports that both servers have."""
        for name, server in self._servers.items():
            channel = grpc.aio.insecure_channel(server.target)
            self._channels.append(channel)
            self._stubs[name] = pb_grpc.QuantizedLinearStub(channel)
        transports = ["unary"]
        if await serves_stream(self._stubs["qlinear"]):
            transports.append("stream")
        for transport in transports:
            for stub in self._stubs.values():
                await self._drives[transport](
                    stub, self._request, in_flight=IN_FLIGHT, seconds=WARMUP_SECONDS
                )
        return transports

    async def close(self) -> None:
        """Disconnect."""
        for channel in self._channels:
            await channel.close()

    async def run(self, case: Case) -> Run:
        """Run one case once."""
        server = self._servers[case.server]
        before = server.cpu_seconds()
        loop = await self._drives[case.transport](
            self._stubs[case.server], self._request, in_flight=case.in_flight, seconds=self._seconds
        )
        return Run((server.cpu_seconds() - before) / loop.calls, loop)

    async def alternate(self, cases: list[Case], runs: int) -> dict[Case, list[Run]]:
        """Run every case `runs` times in turn, in alternating order."""
        results: defaultdict[Case, list[Run]] = defaultdict(list)
        for number in range(runs):
            for case in cases if number % 2 == 0 else reversed(cases):
                results[case].append(await self.run(case))
        return results


async def measure(servers: dict[str, ServerProcess], args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    bench = Bench(servers, args.seconds)
    transports = await bench.open()
    busy = [Case(name, way, IN_FLIGHT) for way in transports for name in servers]
    alone = [Case(name, way, 1) for way in transports for name in servers]
    results = await bench.alternate(busy, args.runs)
    results.update(await bench.alternate(alone, min(LATENCY_RUNS, args.runs)))
    await bench.close()
    client = await measure_client(
        servers["qlinear"], LAYER, FEATURES, IN_FLIGHT, runs=args.runs, seconds=args.seconds
    )
    return {
        "server": [server_figures(results, way) for way in transports],
        "latency": [latency_figures(case, results[case]) for case in (*alone, *busy)],
        "client": client,
    }


def server_figures(results: dict[Case, list[Run]], transport: str) -> dict[str, Any]:
    """Return what one transport costs both servers."""
    ours, echo = (
        [run.cpu_seconds for run in results[Case(name, transport, IN_FLIGHT)]]
        for name in ("qlinear", "echo")
    )
    return {
        "transport": transport,
        "qlinear_cpu_seconds": statistics.median(ours),
        "echo_cpu_seconds": statistics.median(echo),
        **ratio(ours, echo),
        "target": MOST_RATIO,
    }


def latency_figures(case: Case, runs: list[Run]) -> dict[str, Any]:
    """Return medians over the runs of one case."""
    return {
        "server": case.server,
        "transport": case.transport,
        "in_flight": case.in_flight,
        "p50_seconds": statistics.median(run.loop.percentile(50) for run in runs),
        "p99_seconds": statistics.median(run.loop.percentile(99) for run in runs),
    }


def show(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the tables."""
    out = console(json_to_stdout=args.json == "-")
    rows = [
        [
            row["transport"],
            f"{row['qlinear_cpu_seconds'] * 1e6:.0f}",
            f"{row['echo_cpu_seconds'] * 1e6:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['lowest']:.2f} to {row['highest']:.2f}",
            verdict(row["ratio"], row["target"]),
        ]
        for row in report["server"]
    ]
    title = f"server, µs of processor time per call: {FEATURES}x{FEATURES}, 1 row, "
    title += f"{IN_FLIGHT} in flight, medians of {args.runs} interleaved runs"
    print_table(out, title, ["", "qlinear", "echo", "ratio", "of pairs", "target"], rows)
    if all(row["transport"] != "stream" for row in report["server"]):
        out.print("stream: not measured, this server does not serve MatMulStream\n")
    rows = [
        [f"{row['transport']} via AsyncClient", *(f"{row[name] * 1e6:.0f}" for name in COSTS)]
        for row in report["client"]
    ]
    title = "client and server, µs of processor time per call; the least sum is the best default"
    print_table(out, title, ["", "client", "server", "sum"], rows)
    rows = [
        [
            f"{row['server']} {row['transport']}",
            str(row["in_flight"]),
            f"{row['p50_seconds'] * 1e6:,.0f}",
            f"{row['p99_seconds'] * 1e6:,.0f}",
        ]
        for row in report["latency"]
    ]
    print_table(out, "latency, µs, medians of runs", ["", "in flight", "p50", "p99"], rows)
    print_facts(out, report)


COSTS = ("client_cpu_seconds", "server_cpu_seconds", "sum_cpu_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(prog="qlinear bench service", description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="of each case (default: 7)")
    parser.add_argument("--seconds", type=float, default=0.6, help="of one run (default: 0.6)")
    parser.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    args = parser.parse_args()
    server_cores, own_cores = core_split()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_model(folder, {"square": (FEATURES, FEATURES)})
        stack.enter_context(on_cores(own_cores))
        words = {"qlinear": qlinear_words(model), "echo": echo_words()}
        servers = {name: stack.enter_context(started(words[name], server_cores)) for name in words}
        others, own = Others(), time.process_time()
        used = sum(server.cpu_seconds() for server in servers.values())
        report = asyncio.run(measure(servers, args))
        used = sum(server.cpu_seconds() for server in servers.values()) - used
        report["others_cores"] = others.cores(used + time.process_time() - own)
    report["machine"] = machine()
    show(report, args)
    write_json(args.json, report)


if __name__ == "__main__":
    main()
