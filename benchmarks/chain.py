"""Four layers of a Llama-3-8B block back to back on our GPU kernels, over cold weights.

A chain (ql_cuda_linear_chain: one launch, or launches that overlap), the same layers called one by
one, and what reading all their bytes at once takes. Each layer reads the first columns of what the
one before it wrote, as layers of a model do. Chains must repeat themselves bit by bit, and each of
their layers must be within rounding of a single call on what the chain gave it.
"""

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from block_bench import BlockBench, run
from chain_check import check
from figures import print_table
from kernel_figures import VARIANTS, Shape, copies_for, summary, weight_bytes
from kernel_gpu import Call, Gpu
from kernel_layers import Copy, random_copies
from kernel_ours import Library
from rich.console import Console

from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda_abi import CudaFlag

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


def is_one_launch(library: Library, block: Any) -> bool:
    """Say whether one launch computes all layers of a block."""
    device, count = ctypes.byref(library.device), len(BLOCK)
    return bool(library.functions.ql_cuda_chain_length(block, count, device) == count)


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
        call = chained(library, blocks.params[0])
        checked = check(library, blocks.params[0], call, blocks.ys[1:])
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
                "one_launch": is_one_launch(library, blocks.params[0]),
                "same_bits": checked.same_bits,
                "difference": checked.difference,
                "within_rounding": checked.within_rounding,
            }
        )
    return found


def show(out: Console, found: dict[str, Any]) -> None:
    """Print the table and the machine."""
    print_table(
        out,
        "us of a block: qkv, o, gate and up, down of a Llama-3-8B",
        (
            "rows",
            "floor",
            "chain",
            "/ floor",
            "limit",
            "one by one",
            "/ floor",
            "one launch",
            "same bits",
            "off by",
        ),
        [
            (
                str(one["rows"]),
                f"{one['floor_us']:.1f}",
                f"{one['chain']['us']:.1f}",
                f"{one['chain_over_floor']:.2f}",
                str(one["limit"] or "-"),
                f"{one['one_by_one']['us']:.1f}",
                f"{one['one_by_one_over_floor']:.2f}",
                "yes" if one["one_launch"] else "no",
                "yes" if one["same_bits"] else "NO",
                f"{one['difference']:.1e}" + ("" if one["within_rounding"] else " WRONG"),
            )
            for one in found["figures"]
        ],
    )
    out.print("  ".join(f"{name} {value}" for name, value in found["machine"].items()))


def main(words: list[str]) -> int:
    """Run with these flags; 1 if a chain is not right (chain_check.py)."""
    bench = BlockBench(
        prog="qlinear bench chain",
        description=__doc__ or "",
        rows=(1, 4, 8, 12, 16, 32),
        replays=41,
        measure=lambda *asked: {"figures": measure(*asked)},
        show=show,
        is_right=lambda found: all(
            one["same_bits"] and one["within_rounding"] for one in found["figures"]
        ),
    )
    return run(bench, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
