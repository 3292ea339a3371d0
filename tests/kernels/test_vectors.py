"""Real checkpoints through the compiled kernels: outputs that the writing tools' formats define."""

import numpy as np
import pytest
import torch
from checkpoints import LOADED, PLAIN, VECTORS, packed_layers
from closeness import bound_of

from qlinear_service.checkpoints import open_checkpoint
from qlinear_service.dtypes import DType
from qlinear_service.kernels import build, packing
from qlinear_service.kernels.backends import CpuKernels, Kernels, TorchKernels
from qlinear_service.kernels.reference import linear
from qlinear_service.kernels.torch_types import to_torch


@pytest.fixture(scope="module", params=["cpu", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "torch":
        return TorchKernels()
    return CpuKernels(build.build_cpu_library(build.default_cache_dir()), threads=2)


@pytest.mark.parametrize("name", LOADED)
def test_outputs_of_real_checkpoints(kernels: Kernels, name: str) -> None:
    checkpoint = open_checkpoint(VECTORS / name)
    with np.load(VECTORS / name / "reference.npz") as reference:
        for spec in checkpoint.layers:
            layer = checkpoint.load(spec.module)
            x = torch.from_numpy(reference[f"{spec.module}.x"])
            key = "y_bias" if spec.has_bias and f"{spec.module}.y_bias" in reference else "y"
            expected = torch.from_numpy(reference[f"{spec.module}.{key}"])
            packed = packing.pack(layer)
            for dtype in DType:
                y = kernels.linear(packed, x, dtype).double()
                error = (y - expected).abs() / bound_of(layer, x, expected, dtype)
                assert error.max() <= 1.0, spec.module


@pytest.mark.parametrize("name", PLAIN)
def test_outputs_of_layers_that_stay_unquantized(kernels: Kernels, name: str) -> None:
    with np.load(VECTORS / name / "reference.npz") as reference:
        for layer in packed_layers(VECTORS / name, "keep"):
            module = layer.spec.module
            x = torch.from_numpy(reference[f"{module}.x"])
            key = "y_bias" if layer.spec.has_bias else "y"
            expected = torch.from_numpy(reference[f"{module}.{key}"])
            for dtype in DType:
                y = kernels.linear(layer, x, dtype)
                assert y.dtype == to_torch(dtype)
                error = (y.double() - expected).abs() / bound_of(layer, x, expected, dtype)
                assert error.max() <= 1.0, module


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("rows", [0, 1, 70])
def test_unquantized_layers_take_every_dtype_and_row_count(
    kernels: Kernels, dtype: DType, rows: int
) -> None:
    for layer in packed_layers(VECTORS / "plain-fp16-384x384-bias", "keep"):
        for part in (layer, layer.features(64, 130)):
            x = torch.randn(rows, part.spec.k).to(to_torch(dtype))
            seen = x.to(to_torch(part.spec.compute_dtype)) if dtype is DType.F32 else x
            exact = linear(part, seen, output_dtype=DType.F32, precision=torch.float64).double()
            y = kernels.linear(part, x, dtype)
            assert y.shape == exact.shape
            assert ((y.double() - exact).abs() <= bound_of(part, seen, exact, dtype)).all()
