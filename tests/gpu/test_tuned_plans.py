"""Measured plans on the GPU itself: what a table may hold computes the same, or is passed over."""

import pytest
import torch
from gpu import loading
from gpu.loading import RecordingKernels
from gpu.problems import FEW_FORMS, Form, Problem
from gpu.running import check, plan_of

from qlinear_service.dtypes import DType
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda_abi import CudaPlan
from qlinear_service.kernels.cuda_plans import CudaPlans
from qlinear_service.kernels.known_layers import KnownLayers
from qlinear_service.kernels.plan_values import plan_values
from qlinear_service.kernels.planner import Planner
from qlinear_service.kernels.tuned_plans import TunedPlans
from qlinear_service.kernels.tuned_table import Entry, Run, Table, bucket_of
from qlinear_service.kernels.tuned_table import Form as TunedForm

ROWS = (1, 7, 16, 40, 130, 500)
MOST = 24
"""Plans of each problem, spread over all that the planner weighs."""


def table_of(kernels: RecordingKernels, problem: Problem, m: int, plan: CudaPlan) -> Table:
    """Return a table that holds one plan for one layer on this GPU."""
    spec, info = problem.layer.spec, kernels.info
    bucket = bucket_of(m)
    assert bucket is not None
    form = TunedForm.of(
        n=spec.n, k=spec.k, bits=spec.bits, group_size=spec.group_size, zeros=not spec.symmetric,
        dtype=DType.F16,
    )  # fmt: skip
    entry = Entry(form=form, m=bucket, plan=plan_values(plan), kept=False, us=1.0, planner_us=1.0)
    return Table(
        runs=(
            Run(
                gpu=info.name.decode(),
                sm_count=info.sm_count,
                cuda_driver=info.driver_version,
                entries=(entry,),
            ),
        )
    )


@pytest.fixture(scope="module")
def tuned(kernels: RecordingKernels) -> RecordingKernels:
    """Kernels of their own, whose tables a test may change."""
    return loading.open_kernels()


@pytest.mark.parametrize("form", FEW_FORMS, ids=str)
def test_what_the_planner_weighs_is_exact_as_a_tables_plan(
    kernels: RecordingKernels, tuned: RecordingKernels, form: Form
) -> None:
    problem = Problem(kernels.device, 520, 2048, form)
    planner = Planner(kernels.runtime.library)
    used = 0
    for m in ROWS:
        x = problem.x(m)
        exact = problem.product(x)
        params = LinearParams.from_buffer_copy(kernels._params_of(problem.layer))
        params.m, params.x_dtype, params.y_dtype = m, DType.F16, DType.F32
        params.x_row_stride, params.y_row_stride = params.k, params.n
        found = planner.candidates(params, kernels.info)
        status, own = plan_of(kernels, problem, m)
        assert status == 0
        assert bytes(planner.choice(params, kernels.info).plan) == bytes(own)
        for each in found[:: -(-len(found) // MOST)]:
            tables = [table_of(kernels, problem, m, each.plan)]
            measured = TunedPlans(tables, planner, tuned.info)
            tuned._plans = CudaPlans(tuned.runtime, measured)
            tuned.known = KnownLayers(measured)
            taken = tuned.plan(problem.layer, m, DType.F16, DType.F32)
            used += plan_values(taken) == plan_values(each.plan) != plan_values(own)
            check(tuned, problem, x.half(), exact)
            # Rows that the copy engine cannot take, and rows that nothing was measured with.
            check(tuned, problem, x.float(), exact)
            check(tuned, problem, x.to(torch.bfloat16), exact)
    assert used > len(ROWS)
