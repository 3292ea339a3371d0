"""What the batch-invariant mode costs on a GPU: kernel time with it over that without.

The same layers and rows both ways, graphs of launches over cold copies of a layer, taking turns.
That a row has the same bits in any batch is compared before anything is timed.
"""

import contextlib
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from kernel_gpu import Gpu

from qlinear_service.config import KernelConfig
from qlinear_service.dtypes import DType
from qlinear_service.gpu.choice import architecture_for
from qlinear_service.gpu.made_up import made_up_layer
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.kernels.cuda_library import cuda_library
from qlinear_service.layers import QuantizedLinear

ROWS = (1, 8, 16, 32, 64, 128, 256, 1024)
SHAPES = ("4096x28672", "4096x4096", "14336x4096", "8192x8192")
COLD_BYTES = 200 << 20
"""Of copies of a layer: more than any second cache holds."""
MODES = (False, True)


def measure_shape(
    gpu: Gpu, kernels: dict[bool, CudaKernels], shape: str, rows: Sequence[int], runs: int
) -> list[dict[str, Any]]:
    """Return the medians of one shape for each number of rows."""
    k, n = map(int, shape.split("x"))

    def layer_of(number: int) -> QuantizedLinear:
        return made_up_layer(
            n=n, k=k, bits=4, group_size=128, symmetric=True, scale_dtype=DType.F16,
            device=gpu.device, module=str(number),
        )  # fmt: skip

    first = layer_of(0)
    copies = -(-COLD_BYTES // first.packed_bytes)
    layers = [first, *map(layer_of, range(1, copies))]
    found = []
    for m in rows:
        x = torch.randn(m, k, device=gpu.device).half()
        outs = {mode: torch.empty(m, n, dtype=torch.float16, device=gpu.device) for mode in MODES}
        _compare(kernels[True], first, x)
        graphs = {
            str(mode): gpu.record(
                [
                    functools.partial(
                        kernels[mode].linear, layer, x, DType.F16, out=outs[mode], stream=gpu.stream
                    )
                    for layer in layers
                ]
            )
            for mode in MODES
        }
        gpu.spin_up(0.05)
        times = gpu.alternate(graphs, runs)
        off, on = (statistics.median(times[str(mode)]) for mode in MODES)
        figures = {"off_us": off, "on_us": on, "cost": on / off}
        found.append({"way": f"{shape} on {gpu.device}", "rows": m, **figures})
    return found


def measure_gpu(
    device: str, library: Path | None, shapes: Sequence[str], rows: Sequence[int], runs: int
) -> list[dict[str, Any]]:
    """Return the medians of all shapes.

    Raises:
        ConfigError, BuildError: there is no such GPU, or no kernels for it.
        RuntimeError: a row has other bits in company, in the mode that promises it has not.
    """
    config = KernelConfig(device=device)
    ordinal = (*config.cuda_ordinals, 0)[0]
    architecture = architecture_for(ordinal)
    gpu = Gpu(ordinal)
    with contextlib.ExitStack() as stack:
        path = library
        if path is None:
            path = stack.enter_context(cuda_library(config.cache_dir, (architecture,)))
        kernels = {mode: CudaKernels(path, device=ordinal, batch_invariant=mode) for mode in MODES}
    for made in kernels.values():
        made.prepare(gpu.stream)
    gpu.spin_up()
    return [row for shape in shapes for row in measure_shape(gpu, kernels, shape, rows, runs)]


def _compare(kernels: CudaKernels, layer: QuantizedLinear, x: torch.Tensor) -> None:
    together = kernels.linear(layer, x, DType.F16)
    for row in {0, len(x) - 1}:
        alone = kernels.linear(layer, x[row : row + 1], DType.F16)[0]
        if not torch.equal(alone, together[row]):
            raise RuntimeError(f"row {row} of {len(x)} has other bits than alone")
