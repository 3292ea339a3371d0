"""`qlinear plan`: floors, plans and expected times, on machines without a GPU."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tuned_tables import entry, planner, slower_plan, table

from qlinear_service.cli import main
from qlinear_service.commands import plan as command
from qlinear_service.errors import BuildError
from qlinear_service.kernels import tuned_plans, tuned_table
from qlinear_service.kernels.build_cuda import source_hash
from qlinear_service.kernels.driver import Driver, Gpu
from qlinear_service.kernels.plan_values import GEOMETRY, plan_values
from qlinear_service.kernels.planner import problem
from qlinear_service.kernels.tuned_plans import user_path
from qlinear_service.planning.gpus import GPUS, by_driver_name, by_name
from qlinear_service.planning.report import START_US

ROOT = Path(__file__).parents[2]
N, K = 4096, 4096
SHAPE = ["--n", str(N), "--k", str(K)]
H200 = by_name("h200")
assert H200 is not None
OTHER = slower_plan(16, N, K, device=H200.device())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table but that of the test, and the library that is built already."""
    monkeypatch.setattr(command, "load_planner", lambda cache_dir: planner())
    monkeypatch.setattr(command, "read_tables", lambda cache: tuned_plans.read_tables(cache, cache))


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    def asked(*words: str) -> dict[str, Any]:
        cache = ["--cache-dir", str(tmp_path), "--json"]
        assert main(["plan", *SHAPE, *cache, *words]) == 0
        return dict(json.loads(capsys.readouterr().out))

    return asked


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_has_a_plan_and_nothing_is_measured_without_a_table(gpu: Any, ask: Any) -> None:
    found = ask("--gpu", gpu.name.lower(), "--m", "1,16,300")
    assert found["gpu"]["source"] == gpu.source
    assert found["gpu"]["measured"] == (gpu.name == "H200")
    assert found["shape"]["weight_bytes"] == N * K // 2 + N * K // 128 * 2
    for line, m in zip(found["plans"], (1, 16, 300), strict=True):
        assert (line["m"], line["measured"], line["source"]) == (m, False, "model")
        assert set(line["plan"]) == set(GEOMETRY)
        assert line["flops"] == 2 * m * N * K
        assert line["nbytes"] == found["shape"]["weight_bytes"] + 2 * m * (N + K)
        assert line["intensity"] == pytest.approx(line["flops"] / line["nbytes"])
        assert line["expected_us"] >= line["floor_us"] + START_US
        assert line["floor_ratio"] == pytest.approx(line["floor_us"] / line["expected_us"])
        assert line["speedup"] == pytest.approx(line["fp16_floor_us"] / line["expected_us"])


def test_floors_are_bytes_or_operations_over_the_rates(ask: Any) -> None:
    few, many = ask("--gpu", "L4", "--m", "1,2048")["plans"]
    assert (few["bound"], many["bound"]) == ("memory", "compute")
    assert few["floor_us"] == pytest.approx(few["nbytes"] / 300e9 * 1e6)
    assert many["floor_us"] == pytest.approx(many["flops"] / 121e12 * 1e6)
    assert many["fp16_floor_us"] == many["floor_us"]
    assert few["fp16_floor_us"] == pytest.approx((2 * N * K + 2 * (N + K)) / 300e9 * 1e6)


def test_the_h200_reads_as_was_measured(ask: Any) -> None:
    data = json.loads((ROOT / "benchmarks/data/h200_read_floor.json").read_text())
    assert H200 is not None
    assert [list(point) for point in H200.read_points] == data["points_mib_us"][1:]
    assert H200.flops == data["peak_tflops"] * 1e12
    assert pytest.approx(H200.roofline().peak_bytes_per_second, rel=0.01) == H200.bytes_per_second
    (line,) = ask("--gpu", "NVIDIA H200", "--m", "1")["plans"]
    assert line["floor_us"] == pytest.approx(3.6, abs=0.06)


def write(folder: Path, *entries: Any, **more: Any) -> None:
    made = table(*entries, **({"gpu": "NVIDIA H200", "library": source_hash()} | more))
    tuned_table.write(user_path(folder), made)


def test_a_measured_plan_is_shown_as_such(ask: Any, tmp_path: Path) -> None:
    write(tmp_path, entry(16, N, K, OTHER, us=7.25))
    eight, twelve, sixteen = ask("--gpu", "H200", "--m", "8,12,16")["plans"]
    assert eight["measured"] is False
    for line in (twelve, sixteen):
        assert (line["measured"], line["expected_us"], line["plan"]) == (True, 7.25, OTHER)
        assert line["source"] == "measured at M=16, 2026-12-01"
    assert ask("--gpu", "H100", "--m", "16")["plans"][0]["measured"] is False


def test_figures_of_other_kernels_say_so(ask: Any, tmp_path: Path) -> None:
    write(tmp_path, entry(16, N, K, OTHER), library="0")
    (line,) = ask("--gpu", "H200", "--m", "16")["plans"]
    assert line["source"].endswith(", other kernels")


def test_a_kept_plan_is_measured_while_the_planner_still_takes_it(ask: Any, tmp_path: Path) -> None:
    assert H200 is not None
    params = problem(m=16, n=N, k=K, bits=4, group_size=128)
    own = plan_values(planner().choice(params, H200.device()).plan)
    for plan, measured in ((own, True), (OTHER, False)):
        write(tmp_path, entry(16, N, K, plan, kept=True, us=7.0))
        (line,) = ask("--gpu", "H200", "--m", "16")["plans"]
        assert (line["measured"], line["plan"]) == (measured, own)
        assert (line["expected_us"] == 7.0) == measured


@pytest.mark.parametrize("change", [{"stages": 99}, {"brand_new": 1}])
def test_a_plan_that_cannot_run_is_not_shown(
    change: dict[str, int], ask: Any, tmp_path: Path
) -> None:
    write(tmp_path, entry(16, N, K, OTHER | change, us=0.1))
    (line,) = ask("--gpu", "H200", "--m", "16")["plans"]
    assert (line["measured"], line["source"]) == (False, "model")
    assert line["expected_us"] > 3


def test_without_a_planner_floors_are_left(
    ask: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(cache_dir: Path) -> None:
        raise BuildError("there is no C++ compiler")

    monkeypatch.setattr(command, "load_planner", missing)
    assert main(["plan", *SHAPE, "--gpu", "A10", "--cache-dir", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.err == "note: floors only, since there is no planner: there is no C++ compiler\n"
    assert "no planner" in told.out
    (line,) = ask("--gpu", "A10", "--m", "8")["plans"]
    assert line["floor_us"] > 14
    assert {line[name] for name in ("plan", "expected_us", "floor_ratio", "speedup")} == {None}


def test_the_table_names_what_it_shows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write(tmp_path, entry(16, N, K, OTHER, us=7.25))
    words = ["--gpu", "H200", "--m", "1,16", "--cache-dir", str(tmp_path)]
    assert main(["plan", *SHAPE, *words]) == 0
    out = capsys.readouterr().out
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0] == "n=4096 k=4096, 4 bits, groups of 128: 8,650,752 bytes"
    assert "measured by us on 2026-11-29" in lines[1]
    for heading in ("flop/byte", "floor us", "expected us", "speed-up", "plan"):
        assert heading in lines[2]
    assert re.search(r"^ +1 +3\.9 +memory +3\.6 .* model +rows 8 warps", lines[3])
    assert re.search(r"^ +16 .* 7\.2 .* measured at M=16, 2026-12-01 +rows 16 warps", lines[4])
    assert lines[5].startswith("model: not measured; ")


def test_this_machines_gpu_is_known_by_its_driver(
    ask: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = Gpu(ordinal=0, name="NVIDIA H200", major=9, minor=0, memory_bytes=141 << 30)
    driver = Driver(cuda_version=(13, 0), gpus=(gpu,))
    monkeypatch.setattr(command, "ask_driver", lambda: driver)
    mine = table(entry(16, N, K, OTHER, us=7.0), gpu="NVIDIA H200").runs
    newer = table(entry(16, N, K, OTHER, us=9.0), gpu="NVIDIA H200", cuda_driver=14000, date="z")
    tuned_table.write(user_path(tmp_path), tuned_table.Table(runs=(*mine, *newer.runs)))
    found = ask("--m", "16")
    assert (found["gpu"]["name"], found["plans"][0]["expected_us"]) == ("H200", 7.0)
    assert ask("--gpu", "H200", "--m", "16")["plans"][0]["expected_us"] == 9.0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "there is no driver; name a GPU with --gpu: A10, A100-40GB, "),
        (["--gpu", "B7"], "--gpu is 'B7', of which there are no figures; expected A10, "),
        (["--gpu", "A10", "--m", "0"], "--m is '0'; expected one or several numbers from 1 on"),
        (["--gpu", "A10", "--m", "1,x"], "--m is '1,x'; expected"),
        (["--gpu", "A10", "--n", "0"], "--n is 0; expected 1 to 1073741823 features"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(
    words: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "ask_driver", lambda: Driver(problem="there is no driver"))
    assert main(["plan", *SHAPE, *words]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"qlinear plan: {text}")
    assert told.count("\n") == 1


def test_a_gpu_without_figures_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Gpu(ordinal=0, name="NVIDIA T4", major=7, minor=5, memory_bytes=1)
    monkeypatch.setattr(command, "ask_driver", lambda: Driver(gpus=(gpu,)))
    assert main(["plan", *SHAPE]) == 1
    assert "of NVIDIA T4, this machine's GPU, there are no figures" in capsys.readouterr().err


def test_names_of_gpus_mean_one_each() -> None:
    names = [name for gpu in GPUS for name in (gpu.name, *gpu.driver_names)]
    assert len(names) == len(set(names))
    assert by_name("a100 80gb") is by_driver_name("NVIDIA A100-SXM4-80GB")
    assert all(re.search(r"20\d\d", gpu.source) for gpu in GPUS)
