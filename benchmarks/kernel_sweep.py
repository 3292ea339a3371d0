"""Trying plans for one layer and M: which way of cutting the work is fastest here.

Two passes: short graphs of all candidates, nearest to the library's own plan first, for a bounded
time; then those close to the best, checked and timed like every other figure.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from kernel_figures import MIB, Cell, copies_for, summary, weight_bytes
from kernel_gpu import Gpu, Graph
from kernel_journal import Journal
from kernel_layers import random_copies
from kernel_options import Options
from kernel_ours import LibraryError, Ours, plan_values

from qlinear_service.kernels import layout
from qlinear_service.kernels.cuda_abi import Status
from qlinear_service.kernels.plan_values import GEOMETRY, plan_of, plan_text
from qlinear_service.kernels.torch_types import to_torch

FIELDS = GEOMETRY
"""What a candidate sets; the library derives the rest."""
TOKEN_BLOCKS = (1, 2, 4, 8)
WARPS_N = (1, 2, 4, 8)
WARPS_K = (1, 2, 3, 4, 6, 8, 12, 16)
WARPS = range(2, 17)
STAGES = (2, 3, 4, 6)
CTAS_PER_SM = (1, 2, 3, 4)
ROWS_PER_BLOCK, STEP_K = 8, 128
COLUMNS_PER_WARP = 32

SHORT_BYTES, SHORT_REPLAYS = 192 * MIB, 3
"""A short graph still reads three times what the L2 cache holds."""
HOPELESS = 2.0
CLOSE = 1.3
"""Times the best: what is not timed again, and what comes into the second pass."""
FINALISTS = 12
REFUSED = (Status.BAD_PLAN, Status.WORKSPACE)

Values = dict[str, int]


def candidates(
    own: Values, cell: Cell, sm_count: int, weighed: Iterable[Values] = ()
) -> list[Values]:
    """Return plans to try, those that differ least from the library's own first.

    Args:
        own: the library's own.
        cell: layer and rows.
        sm_count: multiprocessors.
        weighed: plans that the planner weighs. They are tried with every ring. Beside them stand
            all ways to arrange warps that copy for themselves; some of those no kernel can run: the
            library knows, and refuses.
    """
    found = [own]
    for plan in weighed:
        chosen = {name: plan[name] for name in FIELDS}
        found += [chosen | {"stages": stages} for stages in (plan["stages"], *STAGES)]
    forms = itertools.product(_token_blocks(cell.m), WARPS_N, WARPS_K)
    for token_blocks, warps_n, warps_k in forms:
        if warps_n * warps_k not in WARPS:
            continue
        cuts = _cuts(cell, token_blocks, warps_n, sm_count)
        for stages, (ctas, whole_tiles) in itertools.product(STAGES, cuts):
            plan = {
                "token_blocks": token_blocks,
                "warps_n": warps_n,
                "warps_k": warps_k,
                "stages": stages,
                "ctas": ctas,
                "whole_tiles": whole_tiles,
            }
            found.append({name: plan.get(name, 0) for name in FIELDS})
    unique = {tuple(plan[name] for name in FIELDS): plan for plan in found}
    return sorted(unique.values(), key=lambda plan: sum(plan[f] != own[f] for f in FIELDS))


def _token_blocks(m: int) -> list[int]:
    """Return how many blocks of rows a tile may hold: what fits m, half of it, and twice."""
    fitting = next((b for b in TOKEN_BLOCKS if b * ROWS_PER_BLOCK >= m), TOKEN_BLOCKS[-1])
    near = (fitting // 2, fitting, 2 * fitting)
    return [blocks for blocks in TOKEN_BLOCKS if blocks in near]


def _cuts(cell: Cell, token_blocks: int, warps_n: int, sm_count: int) -> list[tuple[int, int]]:
    """Return (thread blocks, whole tiles): persistent ones, or one for each tile."""
    n = layout.round_up(cell.shape.n, layout.PAD_N)
    steps = layout.round_up(cell.shape.k, layout.PAD_K) // STEP_K
    found = set()
    tiles = -(-cell.m // (token_blocks * ROWS_PER_BLOCK)) * -(-n // (COLUMNS_PER_WARP * warps_n))
    for ctas in (sm_count * each for each in CTAS_PER_SM):
        found |= {(min(tiles, ctas), 1), (min(tiles * steps, ctas), 0)}
    found.add((tiles, 1))
    return sorted(found)


class Sweep:
    """The plans of one cell, tried."""

    def __init__(
        self,
        cell: Cell,
        gpu: Gpu,
        ours: Ours,
        journal: Journal,
        failed: Callable[[str, Exception], str],
    ) -> None:
        self.cell, self.gpu, self.ours, self.journal = cell, gpu, ours, journal
        self.failed = failed
        self.failures = journal.failures()
        self.refused = 0
        self.best_us = float("inf")
        dtype = to_torch(cell.variant.dtype)
        self.x = torch.randn((cell.m, cell.shape.k), device=gpu.device).to(dtype)
        self.y = torch.empty((cell.m, cell.shape.n), device=gpu.device, dtype=dtype)
        each = weight_bytes(cell.shape, cell.variant).total
        count = max(min(-(-SHORT_BYTES // each), copies_for(each)), 2)
        copies = random_copies(gpu, cell.shape, cell.variant, count)
        self.params = [copy.params(self.x, self.y) for copy in copies]
        self.own = plan_values(ours.library.plan(self.params[0], ours.flags))

    def short_us(self, values: Values) -> float | None:
        """Return the microseconds of a plan in a short graph; None if it cannot run."""
        key = f"{self.cell.key}/{plan_text(values)}"
        if key in self.failures:
            return None
        self.journal.begin(key)
        library = self.ours.library
        launch = library.launch(self.ours.flags, plan_of(values))
        try:
            graph = self.gpu.record([library.linear(params, launch) for params in self.params])
            taken = self.gpu.replay_us(graph)
            if taken < HOPELESS * self.best_us:
                taken = summary(self.gpu.alternate({"": graph}, SHORT_REPLAYS, warmups=0)[""])["us"]
        except Exception as error:
            if isinstance(error, LibraryError) and error.status in REFUSED:
                self.refused += 1
            else:
                self.failed(key, error)
            return None
        self.best_us = min(self.best_us, taken)
        return taken

    def first_pass(self, plans: list[Values], seconds: float) -> list[tuple[float, Values]]:
        """Return (microseconds, plan) of what could be tried, the fastest first."""
        end = time.monotonic() + seconds
        found = []
        for values in plans:
            if time.monotonic() > end:
                break
            taken = self.short_us(values)
            if taken is not None:
                found.append((taken, values))
        return sorted(found, key=lambda pair: pair[0])

    def finals(self, plans: list[Values], replays: int) -> list[dict[str, Any]]:
        """Check plans and time them like any other figure; the fastest first."""
        rows: dict[str, dict[str, Any]] = {}
        graphs: dict[str, Graph] = {}
        for values in plans:
            text = plan_text(values)
            key = f"{self.cell.key}/final {text}"
            if key in self.failures:
                continue
            self.journal.begin(key)
            rows[text] = {"plan": values, "text": text}
            try:
                prepared = self.ours.prepare(self.cell, self.x, self.y, plan_of(values))
                rows[text] |= {"error": prepared.error, "wrong": prepared.wrong}
                if not prepared.wrong:
                    graphs[text] = self.gpu.record(prepared.calls)
            except Exception as error:
                rows[text]["failed"] = self.failed(key, error)
        self.journal.begin(f"{self.cell.key}/timing")
        for text, times in self.gpu.alternate(graphs, replays).items():
            rows[text] |= summary(times)
        return sorted(rows.values(), key=lambda row: row.get("us", float("inf")))


def sweep_cell(
    cell: Cell,
    gpu: Gpu,
    ours: Ours,
    journal: Journal,
    options: Options,
    failed: Callable[[str, Exception], str],
) -> None:
    """Try plans for one cell and note the best of them beside the library's own."""
    journal.begin(f"{cell.key}/set-up")
    sweep = Sweep(cell, gpu, ours, journal, failed)
    own = {name: sweep.own[name] for name in FIELDS}
    weighed = [plan_values(plan) for plan in ours.weighed(sweep.params[0])]
    plans = candidates(own, cell, ours.library.device.sm_count, weighed)
    first = sweep.first_pass(plans, options.sweep_seconds)
    limit = first[0][0] * CLOSE if first else 0.0
    close = [values for taken, values in first if taken <= limit][:FINALISTS]
    if own not in close:
        close.append(own)
    finals = sweep.finals(close, options.replays)
    journal.add(
        "sweep",
        key=cell.key,
        variant=cell.variant.name,
        shape=cell.shape.name,
        k=cell.shape.k,
        n=cell.shape.n,
        m=cell.m,
        own=plan_text(own),
        candidates=len(plans),
        tried=len(first),
        refused=sweep.refused,
        finals=finals,
        first=[{"us": taken, "text": plan_text(values)} for taken, values in first[:50]],
    )
