"""What the batch-invariant mode costs: time with it over that without.

With --device cuda:N kernel time there (invariance_gpu.py). Else processor time of each way in which
the CPU computes, 4 bits or unquantized, one thread; the mode on and off in turn, medians of blocks.
A row's result with the mode is compared, bit for bit, before anything is timed.
"""

import argparse
import functools
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from cpu_op import timed
from figures import console, machine, print_facts, print_table, write_json
from invariance_gpu import ROWS as GPU_ROWS
from invariance_gpu import SHAPES, measure_gpu
from processes import Others
from random_model import random_layer

from qlinear_service.dtypes import DType
from qlinear_service.kernels.backends import CpuBody, CpuKernels, Kernels, TorchKernels
from qlinear_service.kernels.build import build_cpu_library, default_cache_dir
from qlinear_service.kernels.packing import pack
from qlinear_service.layers import UNQUANTIZED_BITS, LayerSpec, LogicalLayer, QuantizedLinear

ROWS = (1, 16, 64, 256, 1024)
UNQUANTIZED = "unquantized"
TORCH = "plain torch"
WAYS = ("AVX512_BF16", "AVX512", "AVX2", "PLAIN", TORCH, UNQUANTIZED)


def unquantized_layer(features: int) -> QuantizedLinear:
    """Return a float16 layer that torch multiplies."""
    spec = LayerSpec(
        model="bench",
        module="plain",
        n=features,
        k=features,
        bits=UNQUANTIZED_BITS,
        group_size=-1,
        symmetric=True,
        has_bias=False,
        scale_dtype=DType.F16,
    )
    weight = torch.randn(features, features).half() / features**0.5
    return pack(LogicalLayer(spec=spec, codes=weight, scales=torch.empty(0).half()))


def kernels_of(way: str, *, batch_invariant: bool) -> Kernels:
    """Return kernels that compute in one of the WAYS."""
    if way == TORCH:
        return TorchKernels(batch_invariant=batch_invariant)
    body = CpuBody.BEST if way == UNQUANTIZED else CpuBody[way]
    library = build_cpu_library(default_cache_dir())
    return CpuKernels(library, threads=1, body=body, batch_invariant=batch_invariant)


def measure(way: str, layer: QuantizedLinear, rows: int, runs: int) -> dict[str, Any]:
    """Return the medians of one way and number of rows."""
    x = torch.randn(rows, layer.spec.k).half()
    off, on = (kernels_of(way, batch_invariant=is_on) for is_on in (False, True))
    together = on.linear(layer, x, DType.F16)
    for row in {0, rows - 1}:
        assert torch.equal(on.linear(layer, x[row : row + 1], DType.F16)[0], together[row])
    seconds: dict[bool, list[float]] = {False: [], True: []}
    calls = max(1, 64 // rows)
    for number in range(runs):
        for is_on in (True, False) if number % 2 else (False, True):
            kernels = on if is_on else off
            multiply = functools.partial(kernels.linear, layer, output_dtype=DType.F16)
            block = timed(multiply, x, calls)
            seconds[is_on].append(block.cpu_seconds)
    medians = {str(is_on).lower(): statistics.median(found) for is_on, found in seconds.items()}
    return {
        "way": way,
        "rows": rows,
        "cpu_seconds": medians,
        "cost": medians["true"] / medians["false"],
    }


def measure_cpu(features: int, runs: int) -> list[dict[str, Any]]:
    """Return the medians of every way and number of rows, on one core."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    quantized = pack(random_layer("square", features, features))
    plain = unquantized_layer(features)
    found = []
    for way in WAYS:
        layer = plain if way == UNQUANTIZED else quantized
        try:
            found += [measure(way, layer, rows, runs) for rows in ROWS]
        except RuntimeError as error:
            if "cannot run that body" not in str(error):
                raise
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="qlinear bench invariance", description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="blocks of each (default: 7)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N [cpu]")
    parser.add_argument("--features", type=int, default=2048, help="k and n, CPU (default: 2048)")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="KxN", help="of a GPU")
    parser.add_argument("--library", type=Path, metavar="FILE", help="GPU kernels, built elsewhere")
    parser.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    args = parser.parse_args()
    others, own = Others(), time.process_time()
    rows: tuple[int, ...] = ROWS
    if args.device == "cpu":
        kind = "processor"
        where = f"k = n = {args.features}"
        found = measure_cpu(args.features, args.runs)
    else:
        rows, kind, where = GPU_ROWS, "kernel", args.device
        found = measure_gpu(args.device, args.library, args.shapes, GPU_ROWS, args.runs)
    report: dict[str, Any] = {"invariance": found}
    report["others_cores"] = others.cores(time.process_time() - own)
    report["machine"] = machine()
    out = console(json_to_stdout=args.json == "-")
    cells: dict[str, list[str]] = {}
    for row in report["invariance"]:
        times = f" ({row['off_us']:.1f})" if "off_us" in row else ""
        cells.setdefault(row["way"], []).append(f"{row['cost']:.2f}{times}")
    title = f"{kind} time with --batch-invariant over that without (µs without); {where}"
    headings = ["", *(f"M = {m}" for m in rows)]
    print_table(out, title, headings, [[way, *costs] for way, costs in cells.items()])
    print_facts(out, report)
    write_json(args.json, report)


if __name__ == "__main__":
    main()
