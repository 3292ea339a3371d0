"""Four layers of a Llama-3-8B block back to back on our GPU kernels, over cold weights.

A chain of overlapping launches (ql_cuda_linear_chain), the same layers called one by one, and what
reading all their bytes at once takes. Each layer reads the first columns of what the one before it
wrote, as layers of a model do; the results of both ways are compared, bit by bit.
"""

import argparse
import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from figures import console, machine, print_table, write_json
from kernel import commit_of, library_of
from kernel_figures import VARIANTS, Shape, copies_for, summary, weight_bytes
from kernel_gpu import Call, Gpu, gpu_state
from kernel_layers import Copy, random_copies
from kernel_ours import Library

from qlinear_service.errors import BuildError
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda_abi import CudaFlag
from qlinear_service.kernels.driver import ask_driver

PROG = "qlinear bench chain"
BLOCK = (
    Shape("qkv", 4096, 6144),
    Shape("o", 4096, 4096),
    Shape("gateup", 4096, 28672),
    Shape("down", 14336, 4096),
)
VARIANT = VARIANTS["f16"]
LIMITS = {1: 1.25, 16: 1.4}
"""Times the floor, by rows."""
FLOOR_STEP_BYTES = 1 << 16


@dataclass(frozen=True)
class Blocks:
    """Some blocks of layers, all with weights of their own, on one x."""

    params: list[Any]
    """Arrays of LinearParams, one for each block."""
    ys: list[torch.Tensor]
    """What the layers of every block write."""


def block_copies(gpu: Gpu, count: int) -> list[list[Copy]]:
    """Return `count` copies of each layer, none of which shares memory with another."""
    found = []
    for shape in BLOCK:
        for kind in ("bits", VARIANT.dtype.text):
            gpu.forget(kind)  # else layers would be pieces of one buffer, and warm in L2
        found.append(random_copies(gpu, shape, VARIANT, count))
    return found


def blocks_of(gpu: Gpu, m: int, copies: Sequence[Sequence[Copy]]) -> Blocks:
    """Return the blocks for m rows; `copies` holds those of each layer."""
    dtype = torch.float16
    x = (torch.randn((m, BLOCK[0].k), device=gpu.device) / 64).to(dtype)
    ys = [torch.empty((m, shape.n), device=gpu.device, dtype=dtype) for shape in BLOCK]
    params = []
    for one in zip(*copies, strict=True):
        block = (LinearParams * len(BLOCK))()
        for place, (copy, source, y) in enumerate(zip(one, [x, *ys[:-1]], ys, strict=True)):
            block[place] = copy.params(source, y)
            block[place].m = m
        params.append(block)
    return Blocks(params, [x, *ys])


def chained(library: Library, block: Any) -> Call:
    """Return the call of a block as one chain."""
    launch = library.launch(CudaFlag.DEPENDENT)

    def call() -> None:
        functions = library.functions
        status = functions.ql_cuda_linear_chain(block, None, len(BLOCK), ctypes.byref(launch))
        library.check(status, "linear_chain")

    return call


def one_by_one(library: Library, block: Any) -> Call:
    """Return the call of a block whose launches do not overlap."""
    launch = library.launch(CudaFlag.NONE)
    calls = [library.linear(params, launch) for params in block]

    def call() -> None:
        for one in calls:
            one()

    return call


def measure(gpu: Gpu, library: Library, rows: Sequence[int], replays: int) -> list[dict[str, Any]]:
    """Return the microseconds of a block, by rows, and of reading its weights."""
    sizes = [weight_bytes(shape, VARIANT).total for shape in BLOCK]
    count = copies_for(sum(sizes))
    copies = block_copies(gpu, count)
    total = sum(sizes) // FLOOR_STEP_BYTES * FLOOR_STEP_BYTES
    gpu.forget("bits")
    buffers = gpu.copies("bits", total, count)
    variants = range(library.functions.ql_cuda_read_variants())
    found = []
    for m in rows:
        blocks = blocks_of(gpu, m, copies)
        results = []
        for way in (one_by_one, chained):
            for y in blocks.ys[1:]:
                y.fill_(float("nan"))
            way(library, blocks.params[0])()
            torch.cuda.synchronize()
            results.append([y.clone() for y in blocks.ys[1:]])
        same = all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*results, strict=True))
        graphs = {
            f"read {variant}": gpu.record([library.read_probe(b, variant) for b in buffers])
            for variant in variants
        }
        graphs["chain"] = gpu.record([chained(library, block) for block in blocks.params])
        graphs["one by one"] = gpu.record([one_by_one(library, block) for block in blocks.params])
        gpu.spin_up()
        times = {name: summary(taken) for name, taken in gpu.alternate(graphs, replays).items()}
        floor = min(times[f"read {variant}"]["us"] for variant in variants)
        found.append(
            {
                "rows": m,
                "floor_us": floor,
                "floor_mib": total / (1 << 20),
                "chain": times["chain"],
                "one_by_one": times["one by one"],
                "chain_over_floor": times["chain"]["us"] / floor,
                "one_by_one_over_floor": times["one by one"]["us"] / floor,
                "limit": LIMITS.get(m),
                "same_bits": same,
            }
        )
    return found


def report(library_path: Path, commit: str, rows: Sequence[int], replays: int) -> dict[str, Any]:
    """Measure and return all that is to be kept."""
    gpu = Gpu()
    library = Library(library_path, gpu)
    gpu.spin_up()
    before = gpu_state()
    figures = measure(gpu, library, rows, replays)
    facts = machine() | {"commit": commit} | {f"before {k}": v for k, v in before.items()}
    facts |= {f"after {k}": v for k, v in gpu_state().items()}
    return {"machine": facts, "figures": figures}


def main(words: list[str]) -> int:
    """Run with these flags; 1 if a chain's results differ from those of single calls."""
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,16,32", help="of x (default: 1,8,16,32)")
    parser.add_argument("--replays", type=int, default=41, help="of each graph (default: 41)")
    parser.add_argument("--library", type=Path, dest="library_file", metavar="FILE", help="ours")
    parser.add_argument("--commit", default=None, help="to be noted (default: what git says)")
    parser.add_argument("--json", metavar="FILE", help="write all figures; - is stdout")
    args = parser.parse_args(words)
    driver = ask_driver()
    if driver.problem:
        print(f"{PROG}: needs a CUDA GPU; {driver.problem}", file=sys.stderr)
        return 2
    rows = [int(word) for word in args.rows.split(",")]
    try:
        with library_of(args.library_file) as library:
            found = report(library, commit_of(args.commit), rows, args.replays)
    except BuildError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    out = console(json_to_stdout=args.json == "-")
    print_table(
        out,
        "us of a block: qkv, o, gate and up, down of a Llama-3-8B",
        ("rows", "floor", "chain", "/ floor", "limit", "one by one", "/ floor", "same bits"),
        [
            (
                str(one["rows"]),
                f"{one['floor_us']:.1f}",
                f"{one['chain']['us']:.1f}",
                f"{one['chain_over_floor']:.2f}",
                str(one["limit"] or "-"),
                f"{one['one_by_one']['us']:.1f}",
                f"{one['one_by_one_over_floor']:.2f}",
                "yes" if one["same_bits"] else "NO",
            )
            for one in found["figures"]
        ],
    )
    out.print("  ".join(f"{name} {value}" for name, value in found["machine"].items()))
    write_json(args.json, found)
    return 0 if all(one["same_bits"] for one in found["figures"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
