"""`qlinear bench tune` with stand-ins for GPU and library: plans take the time that a test says."""

# ruff: noqa: E402
import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
sys.path.insert(0, str(Path(__file__).parent))

import kernel_figures as figures
import kernel_tune
import tune_options
import tune_run
from bench_stand_ins import StandInFunctions, StandInGpu, stand_in_library
from kernel_gpu import Call, Graph
from kernel_journal import Journal
from kernel_ours import Ours
from tuned_tables import FAKE_H200, entry, planner, table

from qlinear_service.errors import QlinearError
from qlinear_service.kernels import tuned_table
from qlinear_service.kernels.plan_values import GEOMETRY, plan_values
from qlinear_service.kernels.planner import problem
from qlinear_service.kernels.tuned_plans import TunedPlans
from qlinear_service.kernels.tuned_table import Entry

N, K = 512, 256
Plan = dict[str, int]
Takes = Callable[[Plan], float]
WORDS = ["--shapes", f"{K}x{N}", "--rows", "16", "--replays", "5", "--commit", "abc"]


def weighed(m: int) -> list[Plan]:
    """What the planner weighs: its own first, then those that it expects most of."""
    found = planner().candidates(problem(m=m, n=N, k=K, bits=4, group_size=128), FAKE_H200)
    return [plan_values(one.plan) for one in sorted(found, key=lambda one: one.microseconds)]


OWN, OTHER = weighed(16)[0], weighed(16)[5]


class Functions(StandInFunctions):
    """With the real planner, and a note of the plan of each product."""

    def __init__(self, spoil: Any = None) -> None:
        super().__init__(spoil)
        self.ql_cuda_plan_candidates = self._cpu.ql_cuda_plan_candidates
        self.ql_cuda_complete_plan = self._cpu.ql_cuda_complete_plan
        self.plan: Plan = {}
        self.failing: Plan | None = None

    def ql_cuda_plan_linear(self, params: Any, device: Any, flags: int, plan: Any) -> int:
        plan._obj.__init__(**plan_values(planner().choice(params._obj, device._obj).plan))
        return 0

    def ql_cuda_linear(self, params: Any, launch: Any) -> int:
        self.plan = plan_values(launch._obj.plan.contents)
        if self.plan == self.failing:
            return 13
        status = int(self._cpu.ql_cpu_linear(params))
        if self._spoil is not None:
            self._spoil(self.plan, params._obj)
        return status


class Gpu(StandInGpu):
    """Where a plan takes what it is told to."""

    takes: Takes
    functions: Functions

    def record(self, calls: Sequence[Call]) -> Graph:
        calls[0]()
        return Graph(self.functions.plan, len(calls))  # type: ignore[arg-type]

    def replay_us(self, recorded: Graph) -> float:
        return self.takes(recorded.graph)  # type: ignore[arg-type]


Tune = Callable[..., tuple[int, dict[str, Any], list[Entry]]]


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Return what tunes and writes: exit code, report and the entries of the table."""
    written, report = tmp_path / "table.json", tmp_path / "report.json"

    def run(
        takes: Takes,
        *more: str,
        spoil: Any = None,
        failing: Plan | None = None,
        seconds: float = 60.0,
    ) -> tuple[int, dict[str, Any], list[Entry]]:
        functions, gpu = Functions(spoil), Gpu()
        functions.failing = failing
        gpu.takes, gpu.functions = takes, functions  # type: ignore[method-assign]
        library = stand_in_library(gpu)
        library.functions, library.device = functions, FAKE_H200  # type: ignore[assignment]
        monkeypatch.setattr(tune_run, "Gpu", lambda: gpu)
        monkeypatch.setattr(tune_run, "Library", lambda path, gpu: library)
        monkeypatch.setattr(tune_run, "torch_facts", lambda: {"torch": "2"})
        monkeypatch.setattr(figures, "FILL_BYTES", 1 << 16)
        words = [*WORDS, "--write", str(written), "--json", str(report), *more]
        options = replace(tune_options.parse(words), deadline=time.time() + seconds)
        journal = Journal(tmp_path / "journal")
        tuner = tune_run.Tuner(options, journal, tmp_path)
        library_file = tmp_path / "library.so"
        library_file.write_bytes(b"library")
        tuner.facts(library_file)
        tuner.run()
        journal = Journal(tmp_path / "journal")
        code = kernel_tune.finish(options, words, journal, code=0, sources="hash")
        entries = []
        if written.exists():
            runs = tuned_table.read(written).runs
            entries = [one for run in runs for one in run.entries]
        return code, json.loads(report.read_text()), entries

    return run


def test_the_fastest_plan_is_found_written_and_used(
    tune: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, (found,) = tune(lambda plan: 5.0 if plan == OTHER else 8.0)
    assert code == 0
    assert (found.plan, found.us, found.planner_us, found.kept) == (OTHER, 5.0, 8.0, False)
    assert found.tried == len({tuple(plan.values()) for plan in weighed(16)}) < len(weighed(16))
    (run,) = tuned_table.read(tmp_path / "table.json").runs
    assert run.machine == ("Fake H200", 132, 13000)
    assert (run.library, run.commit) == ("hash", "abc")
    assert run.command.startswith("qlinear bench tune --shapes")
    assert "cold" in run.method
    assert report["run"]["entries"][0]["us"] == 5.0
    assert report["left"] == 0
    out = capsys.readouterr().out
    assert "Planner over best: 1.600" in out
    assert "8.00" in out
    assert f"1 plans written to {tmp_path}" in out.replace("\n", "")
    # All the way: a layer of this form is launched with it.
    tables = [tuned_table.read(tmp_path / "table.json")]
    params = problem(m=12, n=N, k=K, bits=4, group_size=128)
    plans = TunedPlans(tables, planner(), FAKE_H200).of(params)
    assert plans is not None
    used = plans.plan(params)
    assert used is not None
    assert plan_values(used) == OTHER


def test_the_kernel_benchmark_runs_what_servers_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "FILL_BYTES", 1 << 16)
    library, functions = stand_in_library(StandInGpu()), Functions()
    library.functions, library.device = functions, FAKE_H200  # type: ignore[assignment]
    cell = figures.Cell(figures.VARIANTS["f16"], figures.Shape("x", K, N), 12)
    x, y = torch.randn(12, K).half(), torch.empty(12, N).half()
    tables = [table(entry(16, N, K, OTHER))]
    prepared = Ours(StandInGpu(), library, tables=tables).prepare(cell, x, y)
    assert functions.plan == OTHER
    assert {name: prepared.detail["plan"][name] for name in GEOMETRY} == OTHER
    assert not prepared.wrong


@pytest.mark.parametrize(("us", "kept"), [(8.0, True), (7.9, True), (7.83, False), (9.0, True)])
def test_the_planner_is_followed_unless_another_gains_two_percent(
    us: float, kept: bool, tune: Tune
) -> None:
    _, _, (found,) = tune(lambda plan: us if plan == OTHER else 8.0)
    assert found.kept == kept
    assert (found.plan, found.us) == ((OWN, 8.0) if kept else (OTHER, us))


def test_a_plan_that_computes_wrongly_is_not_taken(tune: Tune) -> None:
    def spoil(plan: Plan, params: Any) -> None:
        if plan == OTHER:
            ctypes.memset(params.y, 0, 2 * params.n)

    code, report, (found,) = tune(lambda plan: 5.0 if plan == OTHER else 8.0, spoil=spoil)
    assert (code, found.kept) == (1, True)
    ((key, text),) = report["troubles"].items()
    assert key.startswith(f"f16/{K}x{N}/16/rows 16")
    assert text.startswith("WRONG: ")


def test_a_plan_that_fails_is_told_and_the_others_go_on(tune: Tune) -> None:
    best = weighed(16)[7]
    takes = {json.dumps(OTHER): 1.0, json.dumps(best): 5.0}
    code, report, (found,) = tune(lambda plan: takes.get(json.dumps(plan), 8.0), failing=OTHER)
    assert (code, found.plan) == (1, best)
    assert len(report["troubles"]) == 1


def test_where_the_planners_own_plan_fails_nothing_is_written(tune: Tune) -> None:
    code, report, entries = tune(lambda plan: 8.0, failing=OWN)
    assert (code, entries, report["left"]) == (1, [], 1)


def test_a_spent_budget_leaves_the_rest_untuned(
    tune: Tune, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, entries = tune(lambda plan: 8.0, seconds=-1.0)
    assert (code, entries, report["left"]) == (0, [], 1)
    assert "the budget was spent: 1 of 1 stay untuned" in capsys.readouterr().out


def test_cells_share_the_time(tune: Tune) -> None:
    """The candidates of one cell alone would take all of it."""

    def slow(plan: Plan) -> float:
        time.sleep(0.03)
        return 8.0

    started = time.monotonic()
    _, _, entries = tune(slow, "--rows", "1,8,16", seconds=6.0)
    assert [one.m for one in entries] == [1, 8, 16]
    assert all(1 < one.tried < 70 for one in entries)
    assert time.monotonic() - started < 15


def test_what_is_done_or_died_is_not_begun_again(tune: Tune, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.fail(f"f16/{K}x{N}/1/set-up", "the process died of signal 11")
    journal.fail(f"f16/{K}x{N}/8/timing", "no end within 45 s: killed")
    code, _, entries = tune(lambda plan: 8.0, "--rows", "1,8,16")
    assert (code, [one.m for one in entries]) == (1, [16])

    def never(plan: Plan) -> float:
        raise AssertionError("it is done")

    assert [one.m for one in tune(never, "--rows", "1,8,16")[2]] == [16]


def test_what_others_have_written_stays(tune: Tune, tmp_path: Path) -> None:
    plan = dict.fromkeys(GEOMETRY, 1)
    old = table(entry(16, N, K, plan), entry(8, N, K, plan), date="2020")
    tuned_table.write(tmp_path / "table.json", old)
    _, _, entries = tune(lambda plan: 8.0)
    assert [(one.m, one.plan) for one in entries] == [(8, plan), (16, OWN)]


def test_a_file_that_is_no_table_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "precious.json"
    path.write_text("{}")
    options = tune_options.parse([*WORDS, "--write", str(path)])
    with pytest.raises(QlinearError, match=r"precious.json is no table of plans"):
        kernel_tune.run(options, WORDS)
    assert path.read_text() == "{}"
    (run,) = table(entry(8, N, K, OWN)).runs
    (tmp_path / "file").touch()
    with pytest.raises(QlinearError, match=r"name another file with --write|cannot be read"):
        kernel_tune.save(tmp_path / "file/x.json", run)
