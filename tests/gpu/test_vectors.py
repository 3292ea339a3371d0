"""Checkpoints of every tool through the GPU kernels, and conversion on the GPU bit by bit."""

import numpy as np
import pytest
import torch
from checkpoints import LOADED, PLAIN, VECTORS, packed_layers, weight_hash, weight_hashes
from closeness import bound_of
from gpu.alike import CUT_SUMS, assert_alike
from gpu.loading import RecordingKernels
from packed_files import assert_same

from qlinear_service.checkpoints import PlainOptions, open_checkpoint
from qlinear_service.dtypes import DType
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.kernels import packing, reference
from qlinear_service.kernels.assembly import Converter
from qlinear_service.kernels.backends import CpuKernels
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.models import CheckpointModel, open_model


@pytest.mark.parametrize("name", LOADED)
def test_outputs_of_real_checkpoints(kernels: RecordingKernels, name: str) -> None:
    checkpoint = open_checkpoint(VECTORS / name)
    with np.load(VECTORS / name / "reference.npz") as stored:
        for spec in checkpoint.layers:
            layer = checkpoint.load(spec.module)
            x = torch.from_numpy(stored[f"{spec.module}.x"])
            key = "y_bias" if spec.has_bias and f"{spec.module}.y_bias" in stored else "y"
            expected = torch.from_numpy(stored[f"{spec.module}.{key}"])
            on_gpu = kernels.to_device(packing.pack(layer))
            for dtype in DType:
                y = kernels.linear(on_gpu, x.to(kernels.device), dtype).cpu().double()
                bound = CUT_SUMS * bound_of(layer, x, expected, dtype)
                assert ((y - expected).abs() <= bound).all(), spec.module


@pytest.mark.parametrize("name", [*LOADED, *PLAIN])
def test_cpu_and_gpu_agree_on_real_checkpoints(
    kernels: RecordingKernels, cpu: CpuKernels, name: str
) -> None:
    checkpoint = open_checkpoint(VECTORS / name)
    for spec in checkpoint.layers:
        assert_alike(kernels, cpu, checkpoint.load(spec.module), torch.randn(5, spec.k).half())


@pytest.mark.parametrize("name", LOADED)
def test_converted_on_the_gpu_every_bit_is_the_same(kernels: RecordingKernels, name: str) -> None:
    there = list(open_model(VECTORS / name).load_layers(Converter(device=kernels.device)))
    here = packed_layers(VECTORS / name)
    for ours, its in zip(there, here, strict=True):
        assert_same(ours, its)
    assert {x.spec.module: weight_hash(x) for x in there} == weight_hashes(name)


@pytest.mark.parametrize("name", PLAIN)
def test_quantized_on_the_gpu_is_as_good(kernels: RecordingKernels, name: str) -> None:
    """Divisions may round differently there: what counts is the error."""
    errors = []
    for device in (kernels.device, torch.device("cpu")):
        model = open_model(VECTORS / name, plain=PlainOptions(treatment="mse"))
        assert isinstance(model, CheckpointModel)
        list(model.load_layers(Converter(device=device)))
        errors.append(model.relative_errors())
    for module, error in errors[0].items():
        assert error == pytest.approx(errors[1][module], rel=1e-3)


@pytest.mark.parametrize("name", PLAIN)
def test_unquantized_layers_are_multiplied_there(kernels: RecordingKernels, name: str) -> None:
    streams = CudaStreams(kernels)
    for layer in packed_layers(VECTORS / name, "keep"):
        spec, on_gpu = layer.spec, kernels.to_device(layer)
        for dtype in DType:
            x = torch.randn(9, spec.k).to(to_torch(dtype))
            marks = streams.new_marks()
            host = x.view(torch.uint8).flatten()
            there = torch.empty_like(host, device=kernels.device)
            y = torch.empty((9, spec.n), dtype=to_torch(dtype), device=kernels.device)
            back = torch.empty_like(y, device="cpu")
            streams.copy_in(host, there, marks)
            streams.multiply(on_gpu, there.view(x.dtype).view(x.shape), y, dtype, marks)
            streams.copy_out(y, back, marks)
            streams.wait(marks)
            exact = reference.linear(layer, x, output_dtype=DType.F32, precision=torch.float64)
            bound = bound_of(layer, x, exact.double(), dtype)
            assert ((back.double() - exact.double()).abs() <= bound).all(), spec.name
            assert streams.times(marks).kernel > 0
