"""Measured plans on their way to a launch: which is used, which is passed over, what it costs."""

import ctypes
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from closeness import assert_close
from fake_cuda import HostEvent, HostKernels, build_fake, pretend
from random_layers import random_layer
from tuned_tables import FAKE_H200, entry, planner, slower_plan, table

from qlinear_service.dtypes import DType
from qlinear_service.kernels import packing, torch_ops, tuned_table
from qlinear_service.kernels.cuda_abi import CudaPlan
from qlinear_service.kernels.plan_values import plan_values
from qlinear_service.kernels.tuned_plans import TunedPlans, read_tables, user_path
from qlinear_service.kernels.tuned_table import Table
from qlinear_service.layers import QuantizedLinear

N, K = 640, 512
PLAN = slower_plan(8, N, K)
FED = slower_plan(8, N, K, fed=1)
NOTHING = dict.fromkeys(PLAN, 0)
LAYER = packing.pack(random_layer(n=N, k=K))

Make = Callable[..., HostKernels]


@pytest.fixture(scope="module")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def fake(library_path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path))
    library.fake_launches.restype = ctypes.c_int64
    library.fake_reset()
    return library


@pytest.fixture
def make(fake: ctypes.CDLL, library_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return what makes kernels with these tables."""
    pretend(monkeypatch)

    def made(*tables: Table, **more: bool) -> HostKernels:
        return HostKernels(library_path, tables=tables, **more)

    return made


def launched(
    kernels: HostKernels,
    fake: ctypes.CDLL,
    m: int,
    *,
    layer: QuantizedLinear = LAYER,
    dtype: torch.dtype = torch.float16,
) -> dict[str, int]:
    """Return the plan that a product was launched with; all 0 for the planner's own."""
    kernels.linear(layer, torch.randn(m, layer.spec.k).to(dtype), DType.F32)
    plan = CudaPlan()
    fake.fake_last_plan(ctypes.byref(plan))
    return plan_values(plan)


def test_the_plan_of_a_bucket_reaches_every_launch_in_it(make: Make, fake: ctypes.CDLL) -> None:
    kernels = make(table(entry(8, N, K, PLAN)))
    found = {m: launched(kernels, fake, m) for m in (1, 2, 5, 8, 9)}
    assert found == {1: NOTHING, 2: PLAN, 5: PLAN, 8: PLAN, 9: NOTHING}
    assert plan_values(kernels.plan(LAYER, 5, DType.F16, DType.F32)) == PLAN
    # Complete, as the library fills in what follows from the rest.
    assert kernels.plan(LAYER, 5, DType.F16, DType.F32).n_tiles > 0
    assert_close(kernels, random_layer(n=N, k=K), torch.randn(5, K).half(), DType.F32)


def test_events_and_plan_go_together(make: Make, fake: ctypes.CDLL) -> None:
    from qlinear_service.kernels.cuda_abi import CudaLaunch

    kernels, events = make(table(entry(8, N, K, PLAN))), (HostEvent(), HostEvent())
    kernels.linear(LAYER, torch.randn(5, K).half(), DType.F32, events=events)
    launch = CudaLaunch()
    fake.fake_last_launch(ctypes.byref(launch))
    assert launch.start_event == events[0].cuda_event != 0
    assert plan_values(launch.plan.contents) == PLAN
    # The struct that all launches of the stream share has not become that one.
    kernels.linear(LAYER, torch.randn(9, K).half(), DType.F32)
    fake.fake_last_launch(ctypes.byref(launch))
    assert not launch.plan


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": "NVIDIA H200"},
        {"sm_count": 66},
    ],
)
def test_another_gpu_is_another_gpu(
    other: dict[str, object], make: Make, fake: ctypes.CDLL
) -> None:
    assert launched(make(table(entry(8, N, K, PLAN), **other)), fake, 8) == NOTHING


@pytest.mark.parametrize("other", [{"n": 576}, {"k": 1024}, {"zeros": True}, {"bits": 8}])
def test_another_layer_is_another_layer(
    other: dict[str, object], make: Make, fake: ctypes.CDLL
) -> None:
    values: dict[str, object] = {"n": N, "k": K} | other
    made = entry(8, plan=PLAN, **values)  # type: ignore[arg-type]
    assert launched(make(table(made)), fake, 8) == NOTHING


def test_entries_of_another_driver_fill_gaps_and_are_told(
    make: Make, fake: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    old = table(entry(8, N, K, FED), entry(16, N, K, PLAN), cuda_driver=12080, date="2027")
    new = table(entry(8, N, K, PLAN))
    both = Table(runs=(*old.runs, *new.runs))
    with caplog.at_level(logging.INFO):
        kernels = make(both)
    assert "entries=2 other_driver=1 other_kernels=2" in caplog.text
    assert launched(kernels, fake, 8) == PLAN
    assert launched(kernels, fake, 16) == PLAN


def test_the_first_table_wins_and_of_one_the_newest_run(make: Make, fake: ctypes.CDLL) -> None:
    mine, shipped = table(entry(8, N, K, FED)), table(entry(8, N, K, PLAN), date="2030")
    assert launched(make(mine, shipped), fake, 8) == FED
    both = Table(runs=(*mine.runs, *shipped.runs))
    assert launched(make(both), fake, 8) == PLAN


def test_a_plan_that_was_kept_is_the_planners(make: Make, fake: ctypes.CDLL) -> None:
    assert launched(make(table(entry(8, N, K, PLAN, kept=True))), fake, 8) == NOTHING


@pytest.mark.parametrize(
    "change",
    [
        *({"stages": 99}, {"token_blocks": 3}, {"warps_k": 0}, {"ctas": -1}, {"ctas": 1 << 30}),
        *({"brand_new": 1}, {"stages": None}),
    ],
)
def test_a_plan_that_cannot_run_is_passed_over(
    change: dict[str, int | None], make: Make, fake: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    values = {name: value for name, value in (PLAN | change).items() if value is not None}
    kernels = make(table(entry(8, N, K, values)))
    with caplog.at_level(logging.DEBUG):
        assert launched(kernels, fake, 8) == NOTHING
    assert "tuned_plan_ignored m=8" in caplog.text
    assert_close(kernels, random_layer(n=N, k=K), torch.randn(8, K).half(), DType.F32)


def test_a_plan_that_is_refused_at_the_launch_is_not_fatal(make: Make, fake: ctypes.CDLL) -> None:
    kernels = make(table(entry(8, N, K, PLAN)))
    fake.fake_refuse_plans(1)
    assert launched(kernels, fake, 8) == NOTHING
    assert fake.fake_launches() == 1
    assert launched(kernels, fake, 8) == PLAN


def test_batch_invariant_results_do_not_depend_on_tables(make: Make, fake: ctypes.CDLL) -> None:
    kernels = make(table(entry(8, N, K, PLAN)), batch_invariant=True)
    assert launched(kernels, fake, 8) == NOTHING


def test_what_is_multiplied_decides_not_what_the_layer_is(make: Make, fake: ctypes.CDLL) -> None:
    kernels = make(table(entry(8, N, K, PLAN), entry(8, N, K, FED, dtype=DType.BF16)))
    assert launched(kernels, fake, 8, dtype=torch.bfloat16) == FED
    assert launched(kernels, fake, 8) == PLAN
    assert launched(kernels, fake, 8, dtype=torch.float32) == PLAN  # rounded to float16
    # The copy engine cannot take float32 rows.
    fed = make(table(entry(8, N, K, FED)))
    assert launched(fed, fake, 8) == FED
    assert launched(fed, fake, 8, dtype=torch.float32) == NOTHING


def test_the_library_is_asked_once_for_each_number_of_rows() -> None:
    asked: list[int] = []

    class Counting:
        def complete(self, params: object, device: object, plan: CudaPlan) -> str:
            asked.append(params.m)  # type: ignore[attr-defined]
            return planner().complete(params, device, plan)  # type: ignore[arg-type]

    from qlinear_service.kernels.planner import problem

    tables = [table(entry(8, N, K, PLAN))]
    tuned = TunedPlans(tables, Counting(), FAKE_H200)  # type: ignore[arg-type]
    params = problem(m=5, n=N, k=K, bits=4, group_size=128)
    plans = tuned.of(params)
    assert plans is not None
    assert plans is tuned.of(params)
    for m in (5, 5, 8, 5, 8, 700, 700):
        params.m = m
        plans.plan(params)
    assert asked == [5, 8]


def test_tables_are_read_from_the_cache_then_from_the_package(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = tmp_path / "shipped"
    mine, theirs = table(entry(8, N, K, FED)), table(entry(8, N, K, PLAN))
    tuned_table.write(shipped / "b.json", theirs)
    assert read_tables(tmp_path / "absent", shipped) == [theirs]
    tuned_table.write(user_path(tmp_path), mine)
    assert read_tables(tmp_path, shipped) == [mine, theirs]
    assert read_tables(None, shipped) == [theirs]
    assert not caplog.records
    user_path(tmp_path).write_text("{")
    assert read_tables(tmp_path, shipped) == [theirs]
    (shipped / "b.json").unlink()
    (shipped / "b.json").mkdir()
    assert read_tables(tmp_path, shipped) == []
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 3
    assert all(text.startswith("tuned_table_ignored path=") for text in warned)


def test_torch_operations_use_the_table_of_the_cache(
    make: Make, fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import contextlib

    from qlinear_service.kernels import architectures, cuda_library

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned_table.write(user_path(tmp_path / "qlinear"), table(entry(8, N, K, PLAN)))
    monkeypatch.setattr(architectures, "chosen_architectures", lambda names: ("90a",))
    monkeypatch.setattr(
        cuda_library, "cuda_library", lambda cache, names: contextlib.nullcontext(Path("x"))
    )
    monkeypatch.setattr(torch_ops, "CudaKernels", lambda path, *, device, tables: make(*tables))
    kernels = torch_ops._default_kernels(torch.device("cuda", 0))
    monkeypatch.setitem(torch_ops._kernels, torch.device("cpu"), kernels)
    torch_ops.QuantizedLinearModule(LAYER)(torch.randn(2, 4, K).half())
    plan = CudaPlan()
    fake.fake_last_plan(ctypes.byref(plan))
    assert plan_values(plan) == PLAN


def test_measured_bandwidths_are_bytes_over_time(make: Make) -> None:
    kernels = make(table(entry(8, N, K, PLAN, us=2.0), entry(16, N, K, PLAN, kept=True, us=4.0)))
    other = packing.pack(random_layer(n=N, k=K, bits=8))
    found = list(kernels.known.tuned_bandwidths([LAYER, other]))
    weights = N * K // 2 + N * K // 128 * 2
    assert found == [
        (LAYER.spec.shape, 8, pytest.approx((weights + 8 * (N + K) * 2) / 2e-6)),
        (LAYER.spec.shape, 16, pytest.approx((weights + 16 * (N + K) * 2) / 4e-6)),
    ]
    assert list(make(batch_invariant=True).known.tuned_bandwidths([LAYER])) == []
