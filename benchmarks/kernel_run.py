"""The measuring process of the kernel benchmark: floors, cells, sweeps, one after the other.

Writes each step into the journal before it begins, so that the watching process knows what was at
fault if this one dies, and goes on behind what is already there.
"""

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from kernel_dequantized import LEAST_ROWS, SLABS_MIB, Dequantized
from kernel_figures import MIB, Cell, copies_for, floor_sizes, summary, weight_bytes
from kernel_gpu import Gpu, Graph, gpu_state, torch_facts
from kernel_journal import USAGE, Journal, one_line
from kernel_layers import Prepared
from kernel_options import OTHER_GPUS, Options
from kernel_ours import Library, LibraryError, Ours, note_failure
from kernel_peers import CUBLAS_LAYOUTS, Cublas, Humming, PeerMissing
from kernel_sweep import sweep_cell

from qlinear_service.kernels.cuda_abi import CudaFlag
from qlinear_service.kernels.library_cache import default_cache_dir
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.kernels.tuned_plans import read_tables

FLOOR_REPLAYS = 15
SLOW_REPLAY_SECONDS, SLOW_REPLAYS = 0.01, 15
"""Long graphs vary less, and the budget is for all."""
REST_SPIN_SECONDS = 0.02
"""Checking leaves the GPU idle for moments in which its clocks may fall."""
FLOOR_STEP_BYTES = 1 << 16
EMPTY_LAUNCHES = 64
BUILD_SECONDS = 240.0
"""How long Humming may take to compile all its kernels."""
MODE_FLAGS = {
    "dependent": CudaFlag.DEPENDENT,
    "invariant": CudaFlag.BATCH_INVARIANT,
    "tuned": CudaFlag.NONE,
    "tuned-dependent": CudaFlag.DEPENDENT,
}


class Contestant(Protocol):
    """Whoever computes y = x W^T."""

    name: str

    def prepare(self, cell: Cell, x: torch.Tensor, y: torch.Tensor) -> Prepared:
        """Return its calls in a cell, after a check."""
        ...


@dataclass(frozen=True)
class Job:
    """One step: its name in the journal, and what it does."""

    key: str
    run: Callable[[], None]


class Runner:
    """All that is measured, in order, on one GPU."""

    def __init__(self, options: Options, journal: Journal, library: Path) -> None:
        self.options, self.journal = options, journal
        journal.begin("start", BUILD_SECONDS)
        self.gpu = Gpu()
        self.library = Library(library, self.gpu)
        self.ours = Ours(self.gpu, self.library)
        self.swept = Ours(self.gpu, self.library, flags=combined(options.modes))
        self._peers: list[Contestant] = []
        self._dequantized: list[Dequantized] = []
        self._failures = journal.failures()

    def facts(self, library: Path) -> None:
        """Note what figures cannot be understood without."""
        self.journal.add(
            "facts",
            **torch_facts(),
            library=library.name,
            library_sha256=hashlib.sha256(library.read_bytes()).hexdigest()[:16],
            architectures=self.library.functions.ql_cuda_architectures().decode(),
        )

    def jobs(self) -> list[Job]:
        """Return all steps, in the order of their importance."""
        cells = self.options.cells()
        if self.options.sweep:
            return [Job("floor", self.measure_floor), *map(self._sweep_job, cells)]
        return [
            Job("floor", self.measure_floor),
            *(self._cell_job(cell) for cell in cells),
            Job("floor again", self.measure_floor),
        ]

    def _cell_job(self, cell: Cell) -> Job:
        return Job(cell.key, lambda: self.measure_cell(cell))

    def _sweep_job(self, cell: Cell) -> Job:
        return Job(cell.key, lambda: self.measure_sweep(cell))

    def run(self) -> None:
        """Do what is not done yet, until the deadline."""
        done = self.journal.done()
        left = [job for job in self.jobs() if job.key not in done]
        self.gpu.spin_up()
        self._note_state("before")
        if not self.options.sweep:
            self._find_peers()
        late = 0
        for job in left:
            if time.time() > self.options.deadline and not job.key.startswith("floor"):
                late += 1
            elif job.key not in self._failures and f"{job.key}/timing" not in self._failures:
                self.guarded(job.key, job.run)
        if late:
            self.journal.add("stopped", left=late)
        self._note_state("after")

    def _note_state(self, when: str) -> None:
        self.journal.add("state", when=when, **gpu_state())

    def guarded(self, key: str, run: Callable[[], None]) -> None:
        """Run one step; what it raises is noted, and only a lost context ends the process."""
        try:
            run()
        except Exception as error:  # one failing step must not take the others with it
            self.failed(key, error)

    def failed(self, key: str, error: Exception) -> str:
        """Note a failure and return it in one line; leaves if the GPU does not answer any more."""
        return note_failure(self.journal, self.gpu, self.library, key, error)

    def _find_peers(self) -> None:
        """Load the peers and compile their kernels; whoever cannot come is noted."""
        if "cublas" in self.options.peers:
            self._peers += [Cublas(self.gpu, order) for order in CUBLAS_LAYOUTS]
        if "dequantized" in self.options.peers:
            self._dequantized = [Dequantized(self.gpu, self.library, mib) for mib in SLABS_MIB]
        if "humming" not in self.options.peers or "Humming" in self._failures:
            return
        self.journal.begin("Humming", BUILD_SECONDS)
        try:
            humming = Humming(self.gpu)
            competing = [c for c in self.options.cells() if c.variant in self.options.peer_variants]
            started = time.monotonic()
            self.guarded("Humming: compiling together", lambda: humming.compile(competing))
            seconds = round(time.monotonic() - started, 1)
            self.journal.add("note", text=f"Humming {humming.version}: compiled in {seconds} s")
            self._peers.append(humming)
        except PeerMissing as error:
            self.journal.fail("Humming", one_line(error))

    def measure_floor(self) -> None:
        """Measure reading, with each of the library's read kernels, and an empty kernel."""
        key = "floor again" if "floor" in self.journal.done() else "floor"
        self.journal.begin(key, BUILD_SECONDS)
        self.gpu.spin_up()
        variants = range(self.library.functions.ql_cuda_read_variants())
        points = []
        for mib in floor_sizes(self.options.cells()):
            size = int(mib * MIB) // FLOOR_STEP_BYTES * FLOOR_STEP_BYTES
            buffers = self.gpu.copies("bits", size, copies_for(size))
            taken = {}
            for variant in variants:
                calls = [self.library.read_probe(buffer, variant) for buffer in buffers]
                graphs = {"": self.gpu.record(calls)}
                taken[variant] = summary(self.gpu.alternate(graphs, FLOOR_REPLAYS)[""])["us"]
            best = min(taken, key=lambda variant: taken[variant])
            points.append(
                {
                    "mib": size / MIB,
                    "us": taken[best],
                    "kernel": best,
                    "all_us": list(taken.values()),
                }
            )
        empty = self.gpu.record([self.library.empty()] * EMPTY_LAUNCHES)
        times = self.gpu.alternate({"": empty}, FLOOR_REPLAYS)[""]
        self.journal.add("job", key=key, points=points, empty_us=summary(times)["us"])

    def contestants(self, cell: Cell) -> list[Contestant]:
        """Return who competes in a cell."""
        found: list[Contestant] = [self.ours]
        for mode in self.options.modes:
            tables = read_tables(default_cache_dir()) if mode.startswith("tuned") else ()
            name = f"qlinear {mode}"
            flags = MODE_FLAGS.get(mode, CudaFlag.NONE)
            other = OTHER_GPUS.get(mode)
            device = None if other is None else other.device()
            found.append(Ours(self.gpu, self.library, name, flags, tables, device))
        if cell.variant in self.options.peer_variants:
            found += self._peers
            if cell.m >= LEAST_ROWS:
                found += self._dequantized
        return found

    def measure_cell(self, cell: Cell) -> None:
        """Check and time all contestants of one cell."""
        dtype = to_torch(cell.variant.dtype)
        x = torch.randn((cell.m, cell.shape.k), device=self.gpu.device).to(dtype)
        y = torch.empty((cell.m, cell.shape.n), device=self.gpu.device, dtype=dtype)
        results: dict[str, dict[str, Any]] = {}
        graphs: dict[str, Graph] = {}
        slowest_us = 0.0
        for contestant in self.contestants(cell):
            key = f"{cell.key}/{contestant.name}"
            result: dict[str, Any] = {}
            results[contestant.name] = result
            if key in self._failures:
                result["failed"] = self._failures[key]
                continue
            self.journal.begin(key)
            try:
                prepared = contestant.prepare(cell, x, y)
                result |= {"error": prepared.error, "detail": prepared.detail}
                if prepared.wrong:
                    result["wrong"] = prepared.wrong
                    continue
                graphs[contestant.name] = graph = self.gpu.record(prepared.calls)
                slowest_us = max(slowest_us, self.gpu.replay_us(graph) * graph.launches)
            except Exception as error:  # the others go on
                graphs.pop(contestant.name, None)
                result["failed"] = self.failed(key, error)
        self.journal.begin(f"{cell.key}/timing")
        self.gpu.spin_up(REST_SPIN_SECONDS)
        replays = self.options.replays
        if slowest_us > SLOW_REPLAY_SECONDS * 1e6:
            replays = min(replays, SLOW_REPLAYS)
        for name, times in self.gpu.alternate(graphs, replays).items():
            results[name] |= summary(times)
        self.journal.add(
            "cell",
            key=cell.key,
            variant=cell.variant.name,
            shape=cell.shape.name,
            k=cell.shape.k,
            n=cell.shape.n,
            m=cell.m,
            copies=copies_for(weight_bytes(cell.shape, cell.variant).total),
            results=results,
        )
        if cell.m == self.options.rows[-1]:
            print(self._progress(cell), file=sys.stderr, flush=True)

    def _progress(self, cell: Cell) -> str:
        """Return one line on a layer whose rows are all measured: how far this run has come."""
        words = []
        for record in self.journal.of("cell"):
            if (record["variant"], record["shape"]) == (cell.variant.name, cell.shape.name):
                ours = record["results"][self.ours.name]
                words.append(f"M={record['m']} {ours['us']:.1f}" if "us" in ours else "-")
        return f"{cell.variant.name} {cell.shape.name}, us: {'  '.join(words)}"

    def measure_sweep(self, cell: Cell) -> None:
        """Try plans for one cell."""
        sweep_cell(cell, self.gpu, self.swept, self.journal, self.options, self.failed)


def combined(modes: list[str]) -> CudaFlag:
    """Return all these modes at once."""
    flags = CudaFlag.NONE
    for mode in modes:
        flags |= MODE_FLAGS.get(mode, CudaFlag.NONE)
    return flags


def measure(options: Options, library: Path) -> int:
    """Measure all that is asked for and return an exit code."""
    assert options.journal is not None
    if not torch.cuda.is_available():
        print(
            f"qlinear bench kernel: needs a torch with CUDA, this is {torch.__version__}",
            file=sys.stderr,
        )
        return USAGE
    journal = Journal(options.journal)
    try:
        runner = Runner(options, journal, library)
    except LibraryError as error:
        print(f"qlinear bench kernel: {one_line(error)}", file=sys.stderr)
        return USAGE
    if not journal.of("facts"):
        runner.facts(library)
    runner.run()
    return 0
