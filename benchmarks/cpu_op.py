"""The CPU operation against torch's own: its 4-bit kernel, and a dense product in float32.

y = x W^T with k = n = 4096, groups of 128. Each timed block repeats one operation; blocks of all
operations alternate, and medians of wall and processor time are compared.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from figures import console, machine, print_facts, print_table, verdict, write_json
from processes import Others
from random_model import random_layer
from resident_weights import resident_ratio

from qlinear_service.dtypes import DType
from qlinear_service.kernels import reference
from qlinear_service.kernels.backends import Kernels, load_kernels
from qlinear_service.kernels.build import default_cache_dir
from qlinear_service.kernels.packing import pack
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LogicalLayer

GROUP = 128
ROWS = (1, 4, 16, 64, 256)
MOST_RATIO = {1: 1.0, 16: 1.0, 64: 1.0}
"""Targets, for bfloat16 x: ours over torch's 4-bit operation; at 64 rows over the better rival."""
MOST_RESIDENT = 1.2
INNER_K_TILES = 2  # of torch's packing; the CPU kernel has no use for it, the signature has

Operation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Block:
    """One timed block, per call."""

    wall_seconds: float
    cpu_seconds: float


def torch_int4(layer: LogicalLayer) -> Operation:
    """Return torch's 4-bit operation on the same codes and scales, in bfloat16."""
    codes = layer.codes.T.contiguous().int()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, INNER_K_TILES)
    # Its zero point is 8 and its offset is added: (code - 8) * scale + 0.
    scales = torch.stack([layer.scales, torch.zeros_like(layer.scales)], dim=-1).bfloat16()

    def multiply(x: torch.Tensor) -> torch.Tensor:
        # Other dtypes cost the conversions, as they would whoever has only this operation.
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), packed, GROUP, scales)
        result: torch.Tensor = y.to(x.dtype)
        return result

    return multiply


def operations(kernels: Kernels, layer: LogicalLayer) -> dict[str, Operation]:
    """Return the three ways to multiply, by name."""
    packed, dense = pack(layer), reference.dequantize(layer)
    dtypes = {to_torch(dtype): dtype for dtype in DType}
    return {
        "qlinear": lambda x: kernels.linear(packed, x, dtypes[x.dtype]),
        "torch int4": torch_int4(layer),
        "dense": lambda x: torch.nn.functional.linear(x.float(), dense).to(x.dtype),
    }


def assert_agree(ways: dict[str, Operation], x: torch.Tensor) -> None:
    """Refuse to time operations that do not compute the same thing."""
    truth = ways["dense"](x).float()
    for name, multiply in ways.items():
        error = (multiply(x).float() - truth).norm() / truth.norm()
        if not error < 0.02:  # torch rounds scales to 8 bits: 2**-9 on average, well below this
            raise SystemExit(f"{name} is off by {float(error):.3f} of the result: nothing timed")


def timed(multiply: Operation, x: torch.Tensor, calls: int) -> Block:
    """Time `calls` calls."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        multiply(x)
    return Block((time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls)


def measure(
    ways: dict[str, Operation], x: torch.Tensor, *, runs: int, seconds: float
) -> dict[str, list[Block]]:
    """Return `runs` blocks of about `seconds` for each operation, in alternating order."""
    calls = {}
    for name, multiply in ways.items():
        timed(multiply, x, 1)
        calls[name] = max(round(seconds / timed(multiply, x, 2).wall_seconds), 1)
    blocks: defaultdict[str, list[Block]] = defaultdict(list)
    for number in range(runs):
        names = list(ways)
        for name in names if number % 2 == 0 else reversed(names):
            blocks[name].append(timed(ways[name], x, calls[name]))
    return blocks


def figures(blocks: dict[str, list[Block]], rows: int, dtype: DType) -> dict[str, Any]:
    """Return the medians of one shape and dtype, and what they come to."""
    walls = {n: statistics.median(b.wall_seconds for b in runs) for n, runs in blocks.items()}
    cpus = {n: statistics.median(b.cpu_seconds for b in runs) for n, runs in blocks.items()}
    rivals = ["torch int4"] if rows < 64 else ["torch int4", "dense"]
    return {
        "rows": rows,
        "dtype": dtype.text,
        "wall_seconds": walls,
        "cpu_seconds": cpus,
        "wall_ratio": walls["qlinear"] / min(walls[name] for name in rivals),
        "cpu_ratio": cpus["qlinear"] / min(cpus[name] for name in rivals),
        "target": MOST_RATIO.get(rows) if dtype is DType.BF16 else None,
    }


def show(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the tables."""
    out = console(json_to_stdout=args.json == "-")
    lines = []
    for row in report["operation"]:
        walls, cpus, target = row["wall_seconds"], row["cpu_seconds"], row["target"]
        cells = [f"{walls[name] * 1e6:,.0f} / {cpus[name] * 1e6:,.0f}" for name in walls]
        ratios = [f"{row['wall_ratio']:.2f}", f"{row['cpu_ratio']:.2f}"]
        judged = "" if target is None else verdict(row["cpu_ratio"], target)
        lines.append([row["dtype"], str(row["rows"]), *cells, *ratios, judged])
    title = (
        f"{report['kernels']}; k = n = {args.features}, groups of {GROUP}\n"
        f"µs wall / processor, {args.threads} threads, medians of {args.runs} interleaved blocks; "
        "ratios to torch int4, from 64 rows on to the better rival"
    )
    headings = ["x", "M", "qlinear", "torch int4", "dense", "wall ratio", "cpu ratio", "cpu target"]
    print_table(out, title, headings, lines)
    resident = report["resident_weight_ratio"]
    out.print(
        f"resident weights / packed bytes: {resident:.2f}, {verdict(resident, MOST_RESIDENT)}\n"
    )
    print_facts(out, report)


def main() -> None:
    parser = argparse.ArgumentParser(prog="qlinear bench cpu", description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="blocks of each (default: 7)")
    parser.add_argument("--seconds", type=float, default=0.04, help="of a block (default: 0.04)")
    parser.add_argument("--features", type=int, default=4096, help="k and n (default: 4096)")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of each operation (default: 1, on one core; more need a machine that does nothing "
        "else, or they measure waiting for each other)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.threads == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    kernels = load_kernels(cache_dir=default_cache_dir(), threads=args.threads)
    layer = random_layer("square", args.features, args.features)
    report: dict[str, Any] = {"kernels": kernels.description, "operation": []}
    report["resident_weight_ratio"] = resident_ratio(args.features, args.threads)
    ways = operations(kernels, layer)
    others, own = Others(), time.process_time()
    for dtype in (DType.BF16, DType.F16, DType.F32):
        for rows in ROWS:
            draw = torch.Generator().manual_seed(rows)
            x = torch.randn((rows, args.features), generator=draw).to(to_torch(dtype))
            assert_agree(ways, x)
            blocks = measure(ways, x, runs=args.runs, seconds=args.seconds)
            report["operation"].append(figures(blocks, rows, dtype))
    report["others_cores"] = others.cores(time.process_time() - own)
    report["machine"] = machine()
    show(report, args)
    write_json(args.json, report)


if __name__ == "__main__":
    main()
