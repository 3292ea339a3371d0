"""What watching costs: processor time of a call with metrics and without, with traces, and scrapes.

Calls are those of `qlinear bench service` (384x384, one row, 64 in flight), of one server a case;
runs of all alternate. "off" counts nothing and has no metrics port. "against" is the server of
another checkout, or of this one: then its distance from "on" is that of two processes that do the
same. The others send traceparent to a server that traces: "unsampled" of a trace that is not kept,
"sampled" of one that is, for a collector that is away.
The scrape is of 200 layers of 6 shapes, every m seen, over HTTP.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias
from urllib.request import urlopen

import grpc
import numpy as np
from callers import Loop, matmul_request, stream, unary
from figures import console, machine, print_facts, print_table, ratio, verdict, write_json
from processes import FOLDER, Others, ServerProcess, core_split, on_cores, qlinear_words, started
from random_model import MODEL, write_model

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc
from qlinear_client import Client

MOST_RATIO = 1.05
MOST_SCRAPE_SECONDS = 0.05
FEATURES = 384
IN_FLIGHT = 64
LAYERS = 200
SHAPES = [(n, k) for n in (128, 256, 384) for k in (128, 256)]
ROWS = (1, 8, 16, 32, 64, 128, 512, 600)
TRANSPORTS = ("unary", "stream")
CASES = ("off", "on", "against", "unsampled", "sampled")
TRACE = f"00-{'ab' * 16}-{'cd' * 8}-"
NOWHERE = ["--trace-endpoint", "http://127.0.0.1:9"]


def cases(model: Path, against: Path | None) -> dict[str, list[str]]:
    """Return how each server is started."""
    real = qlinear_words(model)
    found = {
        "off": [str(FOLDER / "uncounted_server.py"), *real[3:], "--metrics-port", "-1"],
        "on": real,
        "unsampled": [*real, *NOWHERE],
        "sampled": [*real, *NOWHERE],
    }
    if against is not None:
        folders = [str(against / name) for name in ("service", "client", "proto")]
        code = f"import sys; sys.path[:0] = {folders!r}; from qlinear_service.cli import main"
        found["against"] = ["-c", f"{code}; sys.exit(main(sys.argv[1:]))", *real[2:]]
    return found


async def run_once(
    name: str, transport: str, server: ServerProcess, stub: Any, seconds: float
) -> float:
    """Return the server's processor time of a call, in one run."""
    flags = {"unsampled": "00", "sampled": "01"}.get(name)
    text = "" if flags is None else TRACE + flags
    request = matmul_request(f"{MODEL}/square", 1, FEATURES)
    before = server.cpu_seconds()
    loop: Loop
    if transport == "unary":
        metadata = (("traceparent", text),) if text else ()
        loop = await unary(stub, request, in_flight=IN_FLIGHT, seconds=seconds, metadata=metadata)
    else:
        loop = await stream(stub, request, in_flight=IN_FLIGHT, seconds=seconds, traceparent=text)
    return (server.cpu_seconds() - before) / loop.calls


Costs: TypeAlias = dict[tuple[str, str], list[float]]
"""Processor seconds of a call, of each run, by transport and case."""


async def measure(
    servers: dict[str, ServerProcess], costs: Costs, args: argparse.Namespace
) -> None:
    """Add the costs of `args.runs` runs of all cases."""
    channels = {name: grpc.aio.insecure_channel(one.target) for name, one in servers.items()}
    stubs = {name: pb_grpc.QuantizedLinearStub(one) for name, one in channels.items()}
    for transport in args.transport:
        for number in range(args.runs + 1):  # the first warms up
            # Who runs behind whom is worth some percent: another order each time.
            for name in random.Random(number).sample(list(servers), len(servers)):
                cost = await run_once(name, transport, servers[name], stubs[name], args.seconds)
                if number:
                    costs.setdefault((transport, name), []).append(cost)
    for channel in channels.values():
        await channel.close()


def compare(costs: Costs) -> list[dict[str, Any]]:
    """Return the median costs of all cases, and their ratios to "off" or to "on"."""
    rows = []
    for (transport, name), ours in sorted(costs.items(), key=_order):
        compared = "off" if name in ("off", "on") else "on"
        row = {"transport": transport, "case": name, "cpu_seconds": statistics.median(ours)}
        rows.append(row | {"compared": compared, **ratio(ours, costs[transport, compared])})
    return rows


def _order(one: tuple[tuple[str, str], list[float]]) -> tuple[int, int]:
    (transport, name), _ = one
    return TRANSPORTS.index(transport), CASES.index(name)


def measure_calls(
    words: dict[str, list[str]], cores: set[int], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], float]:
    """Return the costs of all cases, of servers that are started `args.starts` times.

    Two processes of the same code differ by a percent or two for as long as they live. Also the
    processor time of the servers.
    """
    costs: Costs = {}
    used = 0.0
    for _ in range(args.starts):
        with ExitStack() as stack:
            servers = {
                name: stack.enter_context(started(one, cores)) for name, one in words.items()
            }
            asyncio.run(measure(servers, costs, args))
            used += sum(server.cpu_seconds() for server in servers.values())
    return compare(costs), used


def scrape(address: str) -> int:
    """Read the exposition once; return its lines."""
    with urlopen(f"http://{address}/metrics", timeout=20) as got:
        return len(got.read().splitlines())


def measure_scrape(folder: Path, cores: set[int], runs: int) -> dict[str, Any]:
    """Return what a scrape of many layers takes, seen from outside and in processor time."""
    shapes = {f"layers.{number}.proj": SHAPES[number % 6] for number in range(LAYERS)}
    (folder / "many").mkdir()
    model = write_model(folder / "many", shapes)
    words = [*qlinear_words(model), "--measure-seconds", "0"]
    with started(words, cores) as server:
        for transport in ("unary", "stream"):
            with Client(server.target, transport=transport) as client:
                for module, (_, k) in shapes.items():
                    for rows in ROWS if transport == "stream" else (1,):
                        client.matmul(f"{MODEL}/{module}", np.ones((rows, k), np.float16))
        with grpc.insecure_channel(server.target) as channel:
            stub = pb_grpc.QuantizedLinearStub(channel)
            for module in shapes:
                refused = stub.MatMul.future(pb.MatMulRequest(layer=f"{MODEL}/{module}"))
                assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        lines = scrape(server.metrics)
        times = []
        before = server.cpu_seconds()
        for _ in range(runs):
            begun = time.perf_counter()
            scrape(server.metrics)
            times.append(time.perf_counter() - begun)
        cpu_seconds = (server.cpu_seconds() - before) / runs
    return {
        "layers": LAYERS,
        "lines": lines,
        "median_seconds": statistics.median(times),
        "highest_seconds": max(times),
        "cpu_seconds": cpu_seconds,
        "target": MOST_SCRAPE_SECONDS,
    }


def show(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the tables."""
    out = console(json_to_stdout=args.json == "-")
    rows = [
        [
            f"{row['transport']} {row['case']}",
            f"{row['cpu_seconds'] * 1e6:.1f}",
            f"{row['ratio']:.3f} x {row['compared']}",
            f"{row['paired']:.3f}",
            f"{row['lowest']:.2f} to {row['highest']:.2f}",
            verdict(row["ratio"], MOST_RATIO) if row["case"] == "on" else "",
        ]
        for row in report["calls"]
    ]
    title = f"server, µs of processor time per call: {FEATURES}x{FEATURES}, 1 row, {IN_FLIGHT} in "
    title += f"flight, medians of {args.runs * args.starts} interleaved runs"
    print_table(out, title, ["", "µs", "ratio", "of pairs", "these from", "target"], rows)
    one = report["scrape"]
    cells = [
        f"{one['layers']} layers, {one['lines']} lines",
        f"{one['median_seconds'] * 1e3:.1f}",
        f"{one['highest_seconds'] * 1e3:.1f}",
        f"{one['cpu_seconds'] * 1e3:.1f}",
        verdict(one["median_seconds"], MOST_SCRAPE_SECONDS),
    ]
    headings = ["", "median", "highest", "processor time", "target, s"]
    print_table(out, "a scrape over HTTP, ms", headings, [cells])
    print_facts(out, report)


def main() -> None:
    parser = argparse.ArgumentParser(prog="qlinear bench metrics", description=__doc__)
    parser.add_argument("--starts", type=int, default=3, help="of each server (default: 3)")
    parser.add_argument(
        "--runs", type=int, default=9, help="of each case and start, interleaved (default: 9)"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="of one run (default: 0.5)")
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", help='beside "off" and "on" (default: all)'
    )
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout")
    parser.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    args = parser.parse_args()
    server_cores, own_cores = core_split()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_model(folder, {"square": (FEATURES, FEATURES)})
        stack.enter_context(on_cores(own_cores))
        words = {
            name: one
            for name, one in cases(model, args.against).items()
            if args.only is None or name in ("off", "on", *args.only)
        }
        others, own = Others(), time.process_time()
        calls, used = measure_calls(words, server_cores, args)
        report: dict[str, Any] = {"calls": calls}
        report["others_cores"] = others.cores(used + time.process_time() - own)
        report["scrape"] = measure_scrape(folder, server_cores, max(args.runs * args.starts, 7))
    report["machine"] = machine()
    show(report, args)
    write_json(args.json, report)


if __name__ == "__main__":
    main()
