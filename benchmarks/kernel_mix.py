"""Decode and prefill in turn: layers of a block with M = 1, 16, 64, 256, 1024, over and over.

A kernel may be fast only while the same one ran before it: its code and its constants are cached,
clocks are where it wants them. So one CUDA graph runs a block of a Llama-3-8B with each M in turn,
every block on cold weights of its own, and events inside the graph tell how long each block took;
graphs of one M alone tell how long it takes by itself. cuBLAS in float16 does the same in the same
run, each of its products in the faster of two weight layouts; graphs take turns, to and fro.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from block_bench import BlockBench, run
from chain import BLOCK, VARIANT, block_copies, blocks_of, chained, one_by_one
from figures import print_table
from kernel_figures import Cell, copies_for, geomean, summary, weight_bytes
from kernel_gpu import WARMUPS, Call, Gpu, Graph
from kernel_layers import checked
from kernel_ours import Library
from kernel_peers import CUBLAS_LAYOUTS, Cublas
from rich.console import Console

from qlinear_service.kernels.cuda_abi import CudaFlag

ROWS = (1, 16, 64, 256, 1024)
OURS, CHAIN, CUBLAS = "qlinear", "qlinear chain", "cuBLAS"
CHOICE_REPLAYS = 3
"""For choosing cuBLAS's layouts."""

Block = Callable[[int, int], Call]
"""Returns the call of a block with so many rows, on the weights of so many."""


def new_mark() -> torch.cuda.Event:
    """Return an event that a graph records each time it runs."""
    return torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Marked:
    """A graph of blocks with an event before, between and behind them."""

    graph: Graph
    rows: list[int]
    """Of each block."""
    marks: list[torch.cuda.Event]

    def replay(self, gpu: Gpu) -> dict[int, list[float]]:
        """Run it once and return the microseconds of its blocks, by rows."""
        gpu.replay_us(self.graph)
        found: dict[int, list[float]] = {}
        for m, (before, after) in zip(self.rows, pairwise(self.marks), strict=True):
            found.setdefault(m, []).append(before.elapsed_time(after) * 1e3)
        return found


def marked(gpu: Gpu, rows: Sequence[int], calls: Sequence[Call]) -> Marked:
    """Record a graph of blocks; `rows` are those of each."""
    marks = [new_mark() for _ in range(len(calls) + 1)]
    steps: list[Call] = [lambda: marks[0].record(gpu.stream)]
    for call, mark in zip(calls, marks[1:], strict=True):
        steps += [call, lambda mark=mark: mark.record(gpu.stream)]  # type: ignore[misc]
    return Marked(gpu.record(steps), list(rows), marks)


class Ours:
    """Our kernels on blocks of packed layers."""

    def __init__(self, gpu: Gpu, library: Library, rows: Sequence[int]) -> None:
        sizes = [weight_bytes(shape, VARIANT).total for shape in BLOCK]
        self.count = copies_for(sum(sizes))
        self._library = library
        self.copies = block_copies(gpu, self.count)
        self.blocks = {m: blocks_of(gpu, m, self.copies) for m in rows}

    def one_by_one(self, m: int, copy: int) -> Call:
        """Return the call of a block whose launches do not overlap."""
        return one_by_one(self._library, self.blocks[m].params[copy % self.count])

    def chained(self, m: int, copy: int) -> Call:
        """Return the call of a block as one chain."""
        return chained(self._library, self.blocks[m].params[copy % self.count])

    def wrong(self) -> list[str]:
        """Return which layers are not right, with why, each compared with float64 once."""
        found = []
        for m, blocks in self.blocks.items():
            for at, shape in enumerate(BLOCK):
                x, y = blocks.ys[at][:, : shape.k], blocks.ys[at + 1]
                call = self._library.linear(
                    blocks.params[0][at], self._library.launch(CudaFlag.NONE)
                )
                cell = Cell(VARIANT, shape, m)
                _, why = checked(cell, x, y, self.copies[at][0], call)
                found += [f"{shape.name}, M = {m}: {why}"] if why else []
        return found

    def mixed_alike(self, gpu: Gpu, block: Block, mix: Graph, last: Mapping[int, int]) -> bool:
        """Say whether each M has the same bits in the mix as by itself.

        Args:
            gpu: where.
            block: makes the calls of the mix.
            mix: the graph.
            last: which copy of the weights each M has last in it.
        """
        alone = {}
        for m, blocks in self.blocks.items():
            block(m, last[m])()
            alone[m] = [y.clone() for y in blocks.ys[1:]]
            for y in blocks.ys[1:]:
                y.fill_(float("nan"))
        gpu.replay_us(mix)
        return all(
            torch.equal(y, right) and bool(right.isfinite().all())
            for m, blocks in self.blocks.items()
            for y, right in zip(blocks.ys[1:], alone[m], strict=True)
        )


class Dense:
    """cuBLAS on float16 weights, through the peer of `qlinear bench kernel`."""

    def __init__(self, gpu: Gpu, ours: Ours) -> None:
        self.orders: dict[int, list[str]] = {m: [] for m in ours.blocks}
        """Of the weights of each layer, by rows."""
        self._calls: dict[int, list[list[Call]]] = {m: [] for m in ours.blocks}
        for at, shape in enumerate(BLOCK):
            gpu.forget("dense")  # so that no layer finds its weights where another had them
            for m, blocks in ours.blocks.items():
                x, y = blocks.ys[at][:, : shape.k], blocks.ys[at + 1]
                cell = Cell(VARIANT, shape, m)
                calls = {o: Cublas(gpu, o).prepare(cell, x, y).calls for o in CUBLAS_LAYOUTS}
                graphs = {order: gpu.record(calls[order]) for order in CUBLAS_LAYOUTS}
                times = gpu.alternate(graphs, CHOICE_REPLAYS, warmups=1)
                medians = {order: statistics.median(some) for order, some in times.items()}
                best = min(medians, key=medians.__getitem__)
                self.orders[m].append(best)
                self._calls[m].append(calls[best])

    def block(self, m: int, copy: int) -> Call:
        """Return the call of a block."""
        calls = [layer[copy % len(layer)] for layer in self._calls[m]]

        def call() -> None:
            for one in calls:
                one()

        return call


def measure(gpu: Gpu, library: Library, rows: Sequence[int], replays: int) -> dict[str, Any]:
    """Return all times, in microseconds of a block, and what was wrong."""
    ours = Ours(gpu, library, rows)
    wrong = ours.wrong()
    dense = Dense(gpu, ours)
    blocks: dict[str, Block] = {
        OURS: ours.one_by_one,
        CHAIN: ours.chained,
        CUBLAS: dense.block,
    }
    turns = [m for _ in range(ours.count) for m in rows]
    mixes, inside = {}, {}
    for name, block in blocks.items():
        calls = [block(m, at) for at, m in enumerate(turns)]
        mixes[name] = gpu.record(calls)
        inside[name, 0] = marked(gpu, turns, calls)
        for m in rows:
            alone = [block(m, at) for at in range(ours.count)]
            inside[name, m] = marked(gpu, [m] * ours.count, alone)
    last = {m: at % ours.count for at, m in enumerate(turns)}
    alike = all(ours.mixed_alike(gpu, blocks[name], mixes[name], last) for name in (OURS, CHAIN))
    gpu.spin_up()
    whole = {name: summary(times) for name, times in gpu.alternate(mixes, replays).items()}
    return {
        "wrong": wrong,
        "same_bits": alike,
        "orders": dense.orders,
        "round_us": {n: found["us"] * len(rows) for n, found in whole.items()},
        "whole": whole,
        "blocks": by_rows(gpu, inside, rows, replays),
    }


def by_rows(
    gpu: Gpu, inside: Mapping[tuple[str, int], Marked], rows: Sequence[int], replays: int
) -> list[dict[str, Any]]:
    """Return what a block takes within the mix (graphs of 0) and alone, by name and rows."""
    times: dict[tuple[str, int, int], list[float]] = {}
    for number in range(WARMUPS + replays):
        keys = list(inside)
        for key in keys if number % 2 == 0 else reversed(keys):
            found = inside[key].replay(gpu)
            if number >= WARMUPS:
                for m, some in found.items():
                    times.setdefault((*key, m), []).append(statistics.median(some))
    made = []
    for name in dict.fromkeys(name for name, _ in inside):
        for m in rows:
            mix, alone = summary(times[name, 0, m]), summary(times[name, m, m])
            ratio = mix["us"] / alone["us"]
            made.append({"name": name, "rows": m, "mix": mix, "alone": alone, "ratio": ratio})
    return made


def table(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the lines of the table: a line for each M, and the mean and the whole round."""
    by = {(one["name"], one["rows"]): one for one in found["blocks"]}
    names = list(dict.fromkeys(one["name"] for one in found["blocks"]))
    rows = list(dict.fromkeys(one["rows"] for one in found["blocks"]))
    lines = []
    for m in rows:
        words = [str(m)]
        for name in names:
            one = by[name, m]
            words += [f"{one['alone']['us']:.1f}", f"{one['mix']['us']:.1f}", f"{one['ratio']:.3f}"]
        dense = by[CUBLAS, m]["mix"]["us"]
        words += [f"{dense / by[name, m]['mix']['us']:.2f}" for name in (OURS, CHAIN)]
        lines.append(tuple(words))
    rounds, words = found["round_us"], ["in turn"]
    for name in names:
        alone = sum(by[name, m]["alone"]["us"] for m in rows)
        mean = geomean(by[name, m]["ratio"] for m in rows)
        words += [f"{alone:.1f}", f"{rounds[name]:.1f}", f"{mean:.3f}"]
    words += [f"{rounds[CUBLAS] / rounds[name]:.2f}" for name in (OURS, CHAIN)]
    return [*lines, tuple(words)]


def print_report(out: Console, found: dict[str, Any]) -> None:
    """Print the table, the machine and what is wrong."""
    headings = ["M"]
    for name in (OURS, CHAIN, CUBLAS):
        headings += [f"{name} alone", "in the mix", "ratio"]
    headings += [f"cuBLAS / {OURS}", f"cuBLAS / {CHAIN}"]
    title = "us of a block: qkv, o, gate and up, down of a Llama-3-8B, every M in turn"
    print_table(out, title, headings, table(found))
    out.print("  ".join(f"{name} {value}" for name, value in found["machine"].items()))
    for text in found["wrong"]:
        out.print(f"WRONG {text}", soft_wrap=True)
    if not found["same_bits"]:
        out.print("WRONG: results within the mix differ from those of the same calls alone")


def main(words: list[str]) -> int:
    """Run with these flags; 1 if a result of ours is wrong or differs within the mix."""
    bench = BlockBench(
        prog="qlinear bench mix",
        description=__doc__ or "",
        rows=ROWS,
        replays=21,
        measure=measure,
        show=print_report,
        is_right=lambda found: found["same_bits"] and not found["wrong"],
    )
    return run(bench, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
