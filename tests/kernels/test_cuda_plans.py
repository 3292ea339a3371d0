"""Which multiprocessors plans leave to others, with a library that only pretends to have a GPU."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_cuda import HostKernels
from random_layers import random_layer

from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda_abi import CudaPlan
from qlinear_service.kernels.packing import pack

LAYER = pack(random_layer(n=70, k=200))


@pytest.mark.parametrize(
    ("ctas", "left", "expected"),
    [
        (132, 4, 128),
        (128, 4, 128),
        (132, 0, 132),
        (112, 8, 112),
        (256, 4, 256),  # two on each of 128
        (256, 8, 124),
        (384, 4, 384),  # three on each
        (264, 4, 128),
    ],
)
def test_plans_leave_multiprocessors_where_they_do_not_anyway(
    kernels: HostKernels,
    monkeypatch: pytest.MonkeyPatch,
    ctas: int,
    left: int,
    expected: int,
) -> None:
    words = (LAYER, 3, DType.F16, DType.F16)
    assert kernels.info.sm_count == 132
    kernels.leave(8)
    kernels.leave(left)
    whole = kernels._plans.whole

    def measured(*words: Any) -> CudaPlan:
        plan = whole(*words)
        plan.ctas = ctas
        return plan

    monkeypatch.setattr(kernels._plans, "whole", measured)
    assert kernels.plan(*words).ctas == expected

    def of_another_kernel(*words: Any) -> CudaPlan:
        plan = measured(*words)
        plan.kernel += 1
        return plan

    monkeypatch.setattr(kernels._plans, "whole", of_another_kernel)
    assert kernels.plan(*words).ctas == ctas, "the other one may not have been tested"


@pytest.mark.parametrize("left", [-1, 132, 200])
def test_products_must_have_a_multiprocessor(
    kernels: HostKernels,
    left: int,
) -> None:
    kernels.leave(131)
    with pytest.raises(ValueError, match=rf"^{left} multiprocessors cannot .* expected 0 to 131"):
        kernels.leave(left)
    kernels.leave(0)
