"""The server's anonymous memory over many calls of mixed sizes, unary and streamed in turn.

Memory is read between blocks, with nothing in flight. What the first blocks need (buffers,
threads, allocator pools) is not a leak. After them the median of the last third must be within 2 %
of that of the first third: single readings swing with what the allocator has just given back.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
from callers import CALL_SECONDS, matmul_request, serves_stream
from figures import console, machine, print_facts, verdict, write_json
from processes import Others, ServerProcess, core_split, on_cores, qlinear_words, started
from random_model import MODEL, write_model

from qlinear.v1 import linear_pb2 as pb
from qlinear.v1 import linear_pb2_grpc as pb_grpc

SHAPES = {"square": (384, 384), "up": (1536, 384), "down": (384, 1536)}
ROWS = (1, 1, 1, 4, 16, 64, 256)
IN_FLIGHT = 64
BLOCKS = 40
WARMUP_BLOCKS = 8
MOST_GROWTH = 0.02


def mixed_requests() -> list[pb.MatMulRequest]:
    """Return calls of every layer and size."""
    return [
        matmul_request(f"{MODEL}/{module}", rows, k)
        for module, (_, k) in SHAPES.items()
        for rows in ROWS
    ]


async def unary_block(stub: Any, requests: list[pb.MatMulRequest]) -> None:
    """Send all, at most IN_FLIGHT at a time."""
    waiting = iter(requests)

    async def caller() -> None:
        for request in waiting:
            await stub.MatMul(request, timeout=CALL_SECONDS)

    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))


async def stream_block(stub: Any, requests: list[pb.MatMulRequest]) -> None:
    """Send all on one stream, at most IN_FLIGHT at a time."""
    room = asyncio.Semaphore(IN_FLIGHT)
    call = stub.MatMulStream(timeout=CALL_SECONDS * 10)

    async def send() -> None:
        for number, request in enumerate(requests, start=1):
            await room.acquire()
            await call.write(pb.StreamRequest(request_id=number, call=request))
        await call.done_writing()

    sending = asyncio.create_task(send())
    answered = 0
    async for response in call:
        if response.WhichOneof("outcome") != "result":
            raise SystemExit(f"a call failed: {response}")
        answered += 1
        room.release()
    await sending
    assert answered == len(requests)


async def soak(server: ServerProcess, calls: int, seed: int) -> dict[str, Any]:
    """Return the memory after each block."""
    draw = random.Random(seed)
    mixed = mixed_requests()
    series = []
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub = pb_grpc.QuantizedLinearStub(channel)
        ways = [unary_block, *([stream_block] if await serves_stream(stub) else [])]
        for number in range(BLOCKS):
            requests = draw.choices(mixed, k=max(calls // BLOCKS, 1))
            await ways[number % len(ways)](stub, requests)
            series.append(server.anonymous_bytes())
    settled = series[WARMUP_BLOCKS:]
    third = len(settled) // 3
    return {
        "calls": BLOCKS * max(calls // BLOCKS, 1),
        "transports": len(ways),
        "anonymous_bytes": series,
        "growth": statistics.median(settled[-third:]) / statistics.median(settled[:third]) - 1,
        "peak_bytes": max(series),
        "target": MOST_GROWTH,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="qlinear bench soak", description=__doc__)
    parser.add_argument("--calls", type=int, default=200_000, help="(default: 200000)")
    parser.add_argument("--seed", type=int, default=1, help="of the mixture (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    args = parser.parse_args()
    server_cores, own_cores = core_split()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_model(folder, SHAPES)
        stack.enter_context(on_cores(own_cores))
        server = stack.enter_context(started(qlinear_words(model), server_cores))
        others, own, used = Others(), time.process_time(), server.cpu_seconds()
        report = asyncio.run(soak(server, args.calls, args.seed))
        own, used = time.process_time() - own, server.cpu_seconds() - used
        report["others_cores"] = others.cores(own + used)
    report["machine"] = machine()
    out = console(json_to_stdout=args.json == "-")
    series = "  ".join(f"{value / 2**20:.1f}" for value in report["anonymous_bytes"])
    out.print(f"MiB of anonymous memory (RssAnon) after each of {BLOCKS} blocks:\n{series}")
    kinds = "unary and streamed" if report["transports"] == 2 else "unary (no stream is served)"
    out.print(
        f"{report['calls']:,} calls, {kinds}: growth from the first to the last third after "
        f"block {WARMUP_BLOCKS} {report['growth']:+.2%}, {verdict(report['growth'], MOST_GROWTH)}\n"
    )
    print_facts(out, report)
    write_json(args.json, report)


if __name__ == "__main__":
    main()
