"""Real checkpoints through the compiled kernels: outputs that the writing tools' formats define."""

from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import bound_of

from qlinear_service.checkpoints import open_checkpoint
from qlinear_service.dtypes import DType
from qlinear_service.kernels import build, packing
from qlinear_service.kernels.backends import CpuKernels, Kernels, TorchKernels

VECTORS = Path(__file__).parents[1] / "data" / "vectors"
WITH_OUTPUTS = sorted(path.parent.name for path in VECTORS.glob("*/reference.npz"))


@pytest.fixture(scope="module", params=["cpu", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "torch":
        return TorchKernels()
    return CpuKernels(build.build_cpu_library(build.default_cache_dir()), threads=2)


def test_there_are_vectors_with_outputs() -> None:
    assert len(WITH_OUTPUTS) >= 9


@pytest.mark.parametrize("name", WITH_OUTPUTS)
def test_outputs_of_real_checkpoints(kernels: Kernels, name: str) -> None:
    checkpoint = open_checkpoint(VECTORS / name)
    with np.load(VECTORS / name / "reference.npz") as reference:
        for spec in checkpoint.layers:
            layer = checkpoint.load(spec.module)
            x = torch.from_numpy(reference[f"{spec.module}.x"])
            key = "y_bias" if spec.has_bias and f"{spec.module}.y_bias" in reference else "y"
            expected = torch.from_numpy(reference[f"{spec.module}.{key}"])
            for dtype in DType:
                y = kernels.linear(packing.pack(layer), x, dtype).double()
                error = (y - expected).abs() / bound_of(layer, x, expected, dtype)
                assert error.max() <= 1.0, spec.module
