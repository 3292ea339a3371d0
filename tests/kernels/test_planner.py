"""The planner through its C interface, on machines without a GPU."""

import pytest
from tuned_tables import FAKE_H200, planner

from qlinear_service.errors import BuildError
from qlinear_service.kernels import planner as planners
from qlinear_service.kernels.cuda_abi import CudaDevice, CudaFlag, CudaPlan
from qlinear_service.kernels.plan_values import (
    DERIVED,
    GEOMETRY,
    plan_of,
    plan_text,
    plan_values,
)
from qlinear_service.kernels.planner import load_planner, problem
from qlinear_service.planning.gpus import GPUS

SHAPES = [(4096, 4096, 128), (28672, 4096, 32), (70, 200, -1)]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_every_candidate_can_run_and_is_complete(
    n: int, k: int, group_size: int, gpu: planners.CudaDevice
) -> None:
    device, ask = gpu.device(), planner()  # type: ignore[attr-defined]
    for m in (1, 16, 130):
        params = problem(m=m, n=n, k=k, bits=4, group_size=group_size)
        found = ask.candidates(params, device)
        assert len(found) > 10
        for each in found:
            again = plan_of(plan_values(each.plan))
            assert ask.complete(params, device, again) == ""
            assert bytes(again) == bytes(each.plan)
        first = min(found, key=lambda candidate: candidate.microseconds)
        choice = ask.choice(params, device)
        assert (choice.microseconds, bytes(choice.plan)) == (first.microseconds, bytes(first.plan))


def test_batch_invariant_candidates_keep_the_order_of_sums() -> None:
    params = problem(m=40, n=4096, k=4096, bits=4, group_size=128)
    found = planner().candidates(params, FAKE_H200, CudaFlag.BATCH_INVARIANT)
    assert {(one.plan.warps_k, one.plan.whole_tiles, one.plan.warpgroups) for one in found} == {
        (1, 1, 0)
    }


def test_what_cannot_be_asked_is_refused() -> None:
    for wrong, why in (
        ({"bits": 5}, "bits is neither"),
        ({"group_size": 48}, "group_size is none of"),
        ({"m": 0}, "a size is .* 0;"),
        ({"m": -1}, "a size is negative"),
    ):
        values = {"m": 8, "n": 64, "k": 128, "bits": 4, "group_size": 128} | wrong
        with pytest.raises(ValueError, match=rf"no plan for m=.* on 'Fake H200': {why}.*status \d"):
            planner().choice(problem(**values), FAKE_H200)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"sm_count": count} for count in (0, -1, -132, 1 << 30)),
        *({"shared_bytes_per_block": nbytes} for nbytes in (0, -1, 1 << 30)),
        {"shared_bytes_per_sm": 0},
        {"major": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("major", [8, 9])
def test_a_device_that_no_gpu_can_be_is_refused(wrong: dict[str, int], major: int) -> None:
    device = CudaDevice.from_buffer_copy(FAKE_H200)
    for name, value in ({"major": major} | wrong).items():
        setattr(device, name, value)
    params = problem(m=8, n=4096, k=4096, bits=4, group_size=128)
    plan = planner().choice(params, FAKE_H200).plan
    with pytest.raises(ValueError, match=r"Fake H200': no GPU is as described: .*status 14"):
        planner().candidates(params, device)
    assert planner().complete(params, device, plan).startswith("no GPU is as described")


def test_a_device_with_too_little_memory_has_no_plan() -> None:
    device = CudaDevice.from_buffer_copy(FAKE_H200)
    device.shared_bytes_per_block = 1024
    params = problem(m=8, n=4096, k=4096, bits=4, group_size=128)
    with pytest.raises(ValueError, match="'Fake H200': none can run, for too little shared mem"):
        planner().choice(params, device)


def test_the_largest_problems_are_planned_at_once() -> None:
    n = (1 << 30) - 1
    for m, rows in ((1, 8), (65536, 192)):
        chosen = planner().choice(problem(m=m, n=n, k=128, bits=4, group_size=128), FAKE_H200)
        assert chosen.plan.token_blocks * 8 == rows
    with pytest.raises(ValueError, match="too many tiles"):
        planner().choice(problem(m=2**31 - 1, n=n, k=128, bits=4, group_size=128), FAKE_H200)


def test_a_plan_that_cannot_run_says_why_and_stays_as_it_was() -> None:
    params = problem(m=8, n=4096, k=4096, bits=4, group_size=128)
    plan = planner().choice(params, FAKE_H200).plan
    plan.stages = 99
    before = bytes(plan)
    assert "stages must be" in planner().complete(params, FAKE_H200, plan)
    assert bytes(plan) == before
    nothing = problem(m=0, n=4096, k=4096, bits=4, group_size=128)
    assert planner().complete(nothing, FAKE_H200, plan).startswith("a size is")


def test_plans_are_kept_by_name_without_what_follows() -> None:
    assert {*GEOMETRY, *DERIVED} == {name for name, *_ in CudaPlan._fields_}
    values = {name: place + 1 for place, name in enumerate(GEOMETRY)}
    plan = plan_of(values)
    assert plan_values(plan) == values
    assert all(getattr(plan, name) == 0 for name in DERIVED)
    with pytest.raises(ValueError, match=r"must have token_blocks, .*; brand_new, stages differ"):
        plan_of({name: 1 for name in GEOMETRY if name != "stages"} | {"brand_new": 1})


def test_a_plan_in_words_shows_what_it_does_not_know() -> None:
    zeros = dict.fromkeys(GEOMETRY, 0)
    values = zeros | {"token_blocks": 4, "warps_n": 2, "warps_k": 3, "stages": 5, "ctas": 132}
    assert plan_text(values) == "rows 32 warps 2x3 stages 5 ctas 132 split"
    more = {"whole_tiles": 1, "copy_warp": 1, "warpgroups": 1, "brand_new": 7}
    assert plan_text(values | more).endswith("ctas 132 whole fed wgmma brand_new=7")


def test_without_a_compiler_a_cuda_library_plans(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    from qlinear_service.kernels.build import build_cpu_library, default_cache_dir

    built = build_cpu_library(default_cache_dir())

    def missing(*words: object, **more: object) -> object:
        raise BuildError("there is no g++")

    monkeypatch.setattr(planners, "cpu_library", missing)
    monkeypatch.setattr(planners, "find_cuda_library", lambda cache, names: (None, "no"))
    with pytest.raises(BuildError, match=r"there is no g\+\+"):
        load_planner(default_cache_dir())
    monkeypatch.setattr(
        planners, "find_cuda_library", lambda cache, names: (built if "90a" in names else None, "")
    )
    params = problem(m=8, n=4096, k=4096, bits=4, group_size=128)
    assert load_planner(default_cache_dir()).choice(params, FAKE_H200).microseconds > 0
