"""Which kernels the self-test of a GPU takes on made-up layers, as the planner says; none runs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tuned_tables import planner

from qlinear_service.dtypes import DType
from qlinear_service.gpu import selftest
from qlinear_service.kernels.cuda_abi import CudaPlan
from qlinear_service.kernels.planner import problem
from qlinear_service.layers import LayerSpec
from qlinear_service.planning.gpus import GPUS

CPU = torch.device("cpu")


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_made_up_layers_take_every_kernel_that_the_planner_does(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, ask = gpu.device(), planner()

    def kernel(spec: Any, rows: int, x: DType, y: DType) -> CudaPlan:
        form = {"n": spec.n, "k": spec.k, "bits": spec.bits, "group_size": spec.group_size}
        params = problem(m=rows, dtype=x, **form)
        params.scale_dtype, params.y_dtype = spec.scale_dtype, y
        return ask.choice(params, device).plan

    def made_up(*, device: torch.device, **form: Any) -> Any:
        return SimpleNamespace(spec=LayerSpec(model="m", module="l", has_bias=False, **form))

    tested: set[int] = set()
    kernels: Any = SimpleNamespace(device=CPU)
    kernels.plan = lambda layer, *words: kernel(layer.spec, *words)
    monkeypatch.setattr(selftest, "made_up_layer", made_up)
    monkeypatch.setattr(
        selftest, "_test", lambda *words: tested.add(kernels.plan(*words[1:], words[-1]).kernel)
    )
    selftest.run_gpu_self_test(kernels, [])
    taken = {
        kernel(made_up(device=CPU, n=n, k=k, bits=bits, group_size=group_size, symmetric=True,
                       scale_dtype=dtype).spec, rows, dtype, dtype).kernel
        for n, k in ((28672, 4096), (4096, 4096), (4096, 14336), (192, 11008))
        for bits in (4, 8)
        for group_size in (32, 64, 128, -1)
        for dtype in (DType.F16, DType.BF16)
        for rows in (1, 8, 16, 32, 64, 128, 192, 256, 600)
    }  # fmt: skip
    assert len(taken) >= (50 if device.major == 9 else 20)
    assert taken <= tested
