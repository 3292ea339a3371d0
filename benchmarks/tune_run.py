"""The measuring process of `qlinear bench tune`: one cell after the other, until the deadline.

Writes each step into the journal before it begins, as kernel_run.py does.
"""

import hashlib
import sys
import time
from pathlib import Path

import torch
from kernel_figures import Cell
from kernel_gpu import Gpu, gpu_state, torch_facts
from kernel_journal import USAGE, Journal, one_line
from kernel_ours import Library, LibraryError, Ours, note_failure
from kernel_sweep import Sweep, Values
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tune_options import PROG, TuneOptions

from qlinear_service.kernels.plan_values import plan_values
from qlinear_service.kernels.planner import Planner

START_SECONDS = 240.0
"""Loading torch and CUDA, and the first buffers, on a machine that does other things."""
FIRST_PASS = 0.7
"""Of a cell's time; the rest is for checking and timing its best."""
FINALISTS = 4
STEPS = ("/set-up", "/timing")
"""Those of a whole cell: one that died there is left out when the next process goes on."""


class Tuner:
    """All that is tuned, in order, on one GPU."""

    def __init__(self, options: TuneOptions, journal: Journal, library: Path) -> None:
        self.options, self.journal = options, journal
        journal.begin("start", START_SECONDS)
        self.gpu = Gpu()
        self.library = Library(library, self.gpu)
        self.planner = Planner(self.library.functions)
        self.ours = Ours(self.gpu, self.library)

    def facts(self, library: Path) -> None:
        """Note what a table cannot be understood without."""
        device = self.library.device
        self.journal.add(
            "facts",
            **torch_facts(),
            gpu_name=device.name.decode(),
            sm_count=device.sm_count,
            cuda_driver=device.driver_version,
            driver=gpu_state().get("driver_version", ""),
            library_sha256=hashlib.sha256(library.read_bytes()).hexdigest()[:16],
        )

    def run(self) -> None:
        """Tune what is not done yet, until the deadline."""
        over = self.journal.done() | self.journal.failures().keys()
        left = [c for c in self.options.cells if not over & {c.key, *(c.key + s for s in STEPS)}]
        self.gpu.spin_up()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        console = Console(stderr=True)
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
            cells = len(self.options.cells)
            task = bar.add_task("tuning", total=cells, completed=cells - len(left))
            while left:
                seconds = (self.options.deadline - time.time()) / len(left)
                if seconds <= 0:
                    self.journal.add("stopped", left=len(left))
                    return
                cell = left.pop(0)
                bar.update(task, description=f"{cell.variant.name} {cell.shape.name} M={cell.m}")
                try:
                    self.tune(cell, seconds)
                except Exception as error:  # one failing cell must not take the others with it
                    self.failed(cell.key, error)
                bar.advance(task)

    def tune(self, cell: Cell, seconds: float) -> None:
        """Try plans for one cell and note the planner's own and the best."""
        end = time.monotonic() + FIRST_PASS * seconds
        self.journal.begin(f"{cell.key}/set-up")
        sweep = Sweep(cell, self.gpu, self.ours, self.journal, self.failed)
        plans = self.weighed(sweep)
        first = sweep.first_pass(plans, max(end - time.monotonic(), 0.0))
        own = plans[0]
        close = [values for _, values in first if values != own][: FINALISTS - 1]
        finals = sweep.finals([own, *close], self.options.replays)
        self.journal.add(
            "job", key=cell.key, own=own, finals=finals, tried=len(first), candidates=len(plans)
        )

    def weighed(self, sweep: Sweep) -> list[Values]:
        """Return the planner's own plan, then the others that it weighs, most promising first."""
        params, library = sweep.params[0], self.library
        found = self.planner.candidates(params, library.device, self.ours.flags)
        found.sort(key=lambda candidate: candidate.microseconds)
        own = plan_values(library.plan(params, self.ours.flags))
        plans = [own, *(plan_values(each.plan) for each in found)]
        # Small shapes are cut the same way however many blocks a multiprocessor could hold.
        return list({tuple(values.values()): values for values in plans}.values())

    def failed(self, key: str, error: Exception) -> str:
        """Note a failure and return it in one line; leaves if the GPU does not answer any more."""
        return note_failure(self.journal, self.gpu, self.library, key, error)


def measure(options: TuneOptions, library: Path) -> int:
    """Tune all that is asked for and return an exit code."""
    assert options.journal is not None
    if not torch.cuda.is_available():
        text = f"needs a torch with CUDA, this is {torch.__version__}"
        print(f"{PROG}: {text}", file=sys.stderr)
        return USAGE
    journal = Journal(options.journal)
    try:
        tuner = Tuner(options, journal, library)
    except (LibraryError, AttributeError) as error:
        print(f"{PROG}: {one_line(error)}", file=sys.stderr)
        return USAGE
    if not journal.of("facts"):
        tuner.facts(library)
    tuner.run()
    return 0
