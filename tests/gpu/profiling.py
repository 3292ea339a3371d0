"""What launches take as NVIDIA's profiling interface measures it, by a clock of its own."""

import time

import torch
from gpu.loading import RecordingKernels

from qlinear_service.dtypes import DType
from qlinear_service.layers import QuantizedLinear

PAUSE_SECONDS = 0.0005
TURNS = 40


def profiled_seconds(kernels: RecordingKernels, layers: list[QuantizedLinear], rows: int) -> float:
    """Return the device time of one launch among those of all layers, all of one shape.

    With pauses, as a server has that waits for its clients: a device that was idle takes another
    time than one that launches in a row.
    """
    spec = layers[0].spec
    x = torch.randn((rows, spec.k), device=kernels.device).half()
    y = torch.empty((rows, spec.n), dtype=torch.float16, device=kernels.device)
    cuda = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[cuda]) as profiled:
        for layer in layers * TURNS:
            kernels.linear(layer, x, DType.F16, out=y)
            kernels.wait()
            time.sleep(PAUSE_SECONDS)
    found = [event for event in profiled.key_averages() if "cuda::linear_" in event.key]
    assert sum(event.count for event in found) == TURNS * len(layers)
    return sum(event.self_device_time_total for event in found) / (1e6 * TURNS * len(layers))
