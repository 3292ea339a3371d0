"""Tables of measured plans for tests: made of what the planner weighs for a shape."""

from typing import Any

from qlinear_service.dtypes import DType
from qlinear_service.kernels.build import default_cache_dir
from qlinear_service.kernels.cuda_abi import CudaDevice
from qlinear_service.kernels.plan_values import plan_values
from qlinear_service.kernels.planner import Planner, load_planner, problem
from qlinear_service.kernels.tuned_table import Entry, Form, Run, Table

FAKE_H200 = CudaDevice(
    name=b"Fake H200",
    major=9,
    sm_count=132,
    shared_bytes_per_block=227 << 10,
    shared_bytes_per_sm=228 << 10,
    driver_version=13000,
)
"""As tests/csrc/fake_cuda.cpp describes it."""


def planner() -> Planner:
    return load_planner(default_cache_dir())


def slower_plan(
    m: int, n: int, k: int, *, device: CudaDevice = FAKE_H200, fed: int = 0, **form: Any
) -> dict[str, int]:
    """Return a plan that can run, that the planner weighs, and that it does not take."""
    params = problem(m=m, n=n, k=k, bits=form.get("bits", 4), group_size=form.get("g", 128))
    own = plan_values(planner().choice(params, device).plan)
    found = [plan_values(one.plan) for one in planner().candidates(params, device)]
    return next(one for one in found if one != own and one["copy_warp"] == fed)


def entry(m: int, n: int, k: int, plan: dict[str, int], **more: Any) -> Entry:
    """Return an entry for symmetric codes of 4 bits in groups of 128, unless told otherwise."""
    kept, us = more.pop("kept", False), more.pop("us", 5.0)
    form = {"bits": 4, "group_size": 128, "zeros": False, "dtype": DType.F16} | more
    return Entry(
        form=Form.of(n=n, k=k, **form), m=m, plan=plan, kept=kept, us=us, planner_us=6.0, tried=9
    )


def table(*entries: Entry, **more: Any) -> Table:
    """Return a table with one run, of the fake H200 unless told otherwise."""
    values = {"gpu": "Fake H200", "sm_count": 132, "cuda_driver": 13000, "date": "2026-12-01"}
    return Table(runs=(Run(entries=entries, **(values | more)),))
