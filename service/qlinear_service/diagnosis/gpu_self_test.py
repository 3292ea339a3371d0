"""The self-test for GPU kernels without a model: sample layers, drawn and compared on the CPU."""

from pathlib import Path

import torch

from qlinear_service.dtypes import DType
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.layers import QuantizedLinear
from qlinear_service.sample_layers import sample_layers
from qlinear_service.selftest import run_self_test

__all__ = ["tested_kinds"]


def tested_kinds(library: Path, ordinal: int) -> int:
    """Compare the kernels on one GPU with the reference; return how many kinds of layers.

    Raises:
        BuildError: the library cannot serve that GPU.
        SelfTestError: it computes wrongly.
    """
    return run_self_test(_ThroughTheHost(CudaKernels(library, device=ordinal)), sample_layers())


class _ThroughTheHost:
    """GPU kernels for layers and activations that lie in the host's memory."""

    def __init__(self, kernels: CudaKernels) -> None:
        self._kernels = kernels
        self.name, self.description = kernels.name, kernels.description

    def path_rows(self, bits: int) -> tuple[int, ...]:
        return self._kernels.path_rows(bits)

    def linear(self, layer: QuantizedLinear, x: torch.Tensor, output_dtype: DType) -> torch.Tensor:
        device = self._kernels.device
        return self._kernels.linear(
            self._kernels.to_device(layer), x.to(device), output_dtype
        ).cpu()

    def read(self, buffer: torch.Tensor, *, passes: int, threads: int) -> None:
        raise NotImplementedError("a self-test reads nothing")
