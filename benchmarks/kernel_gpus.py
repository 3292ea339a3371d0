"""What machine code and plans say of GPUs that could not be had: registers to expected ratios.

    python benchmarks/kernel_gpus.py LIBRARY --k 4096 --n 28672 --rows 1,16,32,64

Counted, not measured: LIBRARY is disassembled (benchmarks/kernel_sass.py says with what), plans are
the planner's for these GPUs, rates and clocks are data sheets'. Needs no GPU. With --bench FILE,
the JSON of `qlinear bench kernel --also as-A10,as-A100-80GB,as-L4,as-RTX4090` on another GPU, its
times for these plans are scaled by the clocks, too.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from figures import console, print_table, write_json
from kernel_sass import Instruction, Kernel, class_of, figures, find_cuobjdump, hottest_loop
from kernel_sass import kernels_of as disassembled

from qlinear_service.errors import BuildError
from qlinear_service.kernels import layout
from qlinear_service.kernels.cuda_abi import CudaPlan
from qlinear_service.kernels.library_cache import default_cache_dir
from qlinear_service.kernels.planner import Planner, load_planner, problem
from qlinear_service.planning import report
from qlinear_service.planning.gpus import by_name

PROG = "kernel_gpus.py"
LATENCY_NS = 600.0
"""From asking for a byte of memory to having it, on a busy GPU: on the safe side."""
SCHEDULERS = 4
REGISTER_FILE = 65536
STEP_K, TOKENS = 128, 8
"""k of a step, and rows of x in a block."""
X_BYTES = 2
MMA_WEIGHTS = 256


@dataclass(frozen=True)
class Chip:
    """What plans need not know of a GPU."""

    gpu: str
    arch: str
    clock_ghz: float
    """Boost, by the data sheet."""
    most_warps: int
    """Resident on a multiprocessor."""


CHIPS = (
    Chip("A10", "sm_86", 1.695, 48),
    Chip("A100-80GB", "sm_80", 1.41, 64),
    Chip("L4", "sm_89", 2.04, 48),
    Chip("RTX4090", "sm_89", 2.52, 48),
)


@dataclass(frozen=True)
class Line:
    """One GPU and number of rows; bytes and clocks are those of a multiprocessor."""

    gpu: str
    m: int
    plan: str
    registers: int
    shared_kib: float
    """Of all its thread blocks."""
    warps: int
    occupancy: float
    in_flight_kib: float
    """That rings hold beside the step in work: codes, scales and x."""
    wanted_kib: float
    """Rate times LATENCY_NS."""
    per_256: float
    """Warp instructions of the hottest loop for 256 weights, all rows of a tile."""
    wavefronts: float
    """Of shared memory for the same, none of them a conflict's."""
    issue_share: float
    """Time that the schedulers take at least, over the floor."""
    shared_share: float
    """Time that shared memory takes at least, over the floor."""
    expected_ratio: float
    """Floor over what `qlinear plan` expects, by the planner's model."""
    scaled_ratio: float | None
    """Floor over the time of the same plan on as many multiprocessors of another GPU, times that
    one's clock over this one's; at most 1. Too high where tensor cores take more clocks here."""


def wavefronts_of(loop: Sequence[Instruction]) -> int:
    """Return the wavefronts of shared memory in a loop without bank conflicts.

    ldmatrix moves a row of 16 bytes for each of 8 lanes and matrix; others what their width says.
    """
    total = 0
    for instruction in loop:
        kind, suffix = class_of(instruction.name), instruction.suffix
        if kind == "ldsm":
            total += 4 if suffix.endswith(".4") else 2 if suffix.endswith(".2") else 1
        elif kind in ("lds", "sts", "ldgsts"):
            total += 4 if ".128" in suffix else 2 if ".64" in suffix else 1
    return total


def kernel_for(kernels: Sequence[Kernel], arch: str, token_blocks: int) -> Kernel:
    """Return the kernel of fp16, 4 bits and groups of 128 that takes so many blocks of rows.

    Raises:
        LookupError: the library has none for that architecture.
    """
    wanted = f"F16, 4, {token_blocks}, false>"
    name = re.compile(rf"linear_alone<(\w+::)*{wanted}")
    for kernel in kernels:
        if kernel.arch == arch and name.search(kernel.name):
            return kernel
    raise LookupError(f"the library has no kernel linear_alone<{wanted} of {arch}")


def in_flight_bytes(plan: CudaPlan, shape: report.Shape) -> int:
    """Return what a thread block's rings hold beside the steps in work: codes, scales and x."""
    block = layout.TILE_N * (STEP_K * shape.bits // 8 + X_BYTES)  # of n, with one group of scales
    step = plan.tile_blocks * block + plan.token_blocks * TOKENS * STEP_K * X_BYTES
    return int((plan.stages - 1) * plan.warps_k * step)


def scaled_us(bench: dict[str, Any], chip: Chip, shape: report.Shape, m: int) -> float | None:
    """Return the microseconds that another GPU took for this one's plan, at this one's clock.

    Args:
        bench: the report of `qlinear bench kernel`, or nothing.
        chip: this one.
        shape: of the layer.
        m: rows of x.
    """
    for cell in bench.get("cells", ()):
        if (cell["variant"], cell["k"], cell["n"], cell["m"]) == ("f16", shape.k, shape.n, m):
            us = cell["results"].get(f"qlinear as-{chip.gpu}", {}).get("us")
            clock_mhz = float(bench["states"][0]["clocks.sm"].removesuffix(" MHz"))
            return None if us is None else us * clock_mhz / 1e3 / chip.clock_ghz
    return None


def line(
    kernels: Sequence[Kernel],
    planner: Planner,
    chip: Chip,
    shape: report.Shape,
    m: int,
    bench: dict[str, Any],
) -> Line:
    """Return what is to be told of one GPU and number of rows."""
    gpu = by_name(chip.gpu)
    assert gpu is not None
    (told,) = report.plan_lines(shape, [m], gpu, planner, {})
    params = problem(m=m, n=shape.n, k=shape.k, bits=shape.bits, group_size=shape.group_size)
    plan = planner.choice(params, gpu.device()).plan
    fault = planner.complete(params, gpu.device(), plan)
    assert not fault, fault
    kernel = kernel_for(kernels, chip.arch, plan.token_blocks)
    counted, loop = figures(kernel, plan.token_blocks), hottest_loop(kernel.code)
    units, registers = float(str(counted["weights_256"])), kernel.resources["REG"]
    per_256, wavefronts = len(loop) / units, wavefronts_of(loop) / units
    blocks = -(-plan.ctas // gpu.sm_count)
    warps = plan.warps_n * plan.warps_k * blocks
    assert registers * 32 * warps <= REGISTER_FILE, "the plan does not fit"
    assert told.floor_ratio is not None
    # Each tile of rows goes through all weights again.
    row_tiles = -(-m // (TOKENS * plan.token_blocks))
    pieces = shape.n * shape.k / MMA_WEIGHTS * row_tiles / gpu.sm_count
    scaled = scaled_us(bench, chip, shape, m)
    floor_clocks = told.floor_us * 1e3 * chip.clock_ghz
    return Line(
        gpu=chip.gpu,
        m=m,
        plan=f"{blocks} x {plan.warps_n}x{plan.warps_k}",
        registers=registers,
        shared_kib=blocks * plan.shared_bytes / 1024,
        warps=warps,
        occupancy=warps / chip.most_warps,
        in_flight_kib=blocks * in_flight_bytes(plan, shape) / 1024,
        wanted_kib=gpu.bytes_per_second / gpu.sm_count * LATENCY_NS / 1e9 / 1024,
        per_256=per_256,
        wavefronts=wavefronts,
        issue_share=pieces * per_256 / SCHEDULERS / floor_clocks,
        shared_share=pieces * wavefronts / floor_clocks,
        expected_ratio=told.floor_ratio,
        scaled_ratio=None if scaled is None else min(told.floor_us / scaled, 1.0),
    )


def show(lines: Sequence[Line], target: str | None) -> None:
    """Print the table; shares are of the floor's time."""
    headings = ["GPU", "M", "blocks", "regs", "KiB", "warps", "occupancy", "in flight", "wanted"]
    headings += ["instr/256", "waves/256", "issue", "shared", "model", "scaled"]
    rows = [
        (
            one.gpu,
            str(one.m),
            one.plan,
            str(one.registers),
            f"{one.shared_kib:.0f}",
            str(one.warps),
            f"{one.occupancy:.2f}",
            f"{one.in_flight_kib:.0f}",
            f"{one.wanted_kib:.1f}",
            f"{one.per_256:.1f}",
            f"{one.wavefronts:.1f}",
            f"{one.issue_share:.2f}",
            f"{one.shared_share:.2f}",
            f"{one.expected_ratio:.2f}",
            "-" if one.scaled_ratio is None else f"{one.scaled_ratio:.2f}",
        )
        for one in lines
    ]
    title = (
        "counted and modelled, not measured there; KiB of one multiprocessor, instructions and "
        "wavefronts for 256 weights, shares of the floor's time, floor / expected"
    )
    print_table(console(json_to_stdout=target == "-"), title, headings, rows)
    write_json(target, {"lines": [asdict(one) for one in lines]})


def main(words: Sequence[str]) -> int:
    """Run with these flags and return the exit code."""
    parser = argparse.ArgumentParser(prog=PROG, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library", help="with code for sm_80, 86 and 89 (make cuda)")
    parser.add_argument("--k", type=int, default=4096, help="input features [%(default)s]")
    parser.add_argument("--n", type=int, default=28672, help="output features [%(default)s]")
    parser.add_argument("--rows", default="1,16,32,64", metavar="LIST", help="of x [%(default)s]")
    parser.add_argument("--bench", type=Path, metavar="FILE", help="JSON of qlinear bench kernel")
    parser.add_argument("--cuobjdump", metavar="FILE", help="path of the disassembler")
    parser.add_argument("--json", metavar="FILE", help="write all figures; - is stdout")
    args = parser.parse_args(words)
    shape = report.Shape(n=args.n, k=args.k, bits=4, group_size=128)
    kernels = disassembled(find_cuobjdump(args.cuobjdump), args.library)
    rows = [int(word) for word in args.rows.split(",")]
    try:
        planner = load_planner(default_cache_dir())
        bench = {} if args.bench is None else json.loads(args.bench.read_text())
        lines = [line(kernels, planner, chip, shape, m, bench) for chip in CHIPS for m in rows]
    except (BuildError, LookupError, OSError, ValueError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    show(lines, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
