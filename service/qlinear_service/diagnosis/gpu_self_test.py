"""The self-test of GPU kernels without a model: sample layers, and every kernel there is."""

from pathlib import Path

from qlinear_service.gpu.selftest import run_gpu_self_test
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.sample_layers import sample_layers

__all__ = ["tested_kinds"]


def tested_kinds(library: Path, ordinal: int) -> int:
    """Compare the kernels on one GPU with the reference; return how many kinds of layers.

    Raises:
        BuildError: the library cannot serve that GPU.
        SelfTestError: it computes wrongly.
    """
    kernels = CudaKernels(library, device=ordinal)
    return run_gpu_self_test(kernels, map(kernels.to_device, sample_layers()))
