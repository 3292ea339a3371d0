"""Launches of chains for compute-sanitizer: each of their kernels on a few small layers.

They have no number in the library: here they come behind all that have. Knows no torch.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gpu.bare import COUNTER_BYTES, Memory, Packed, drawn_layer, encoded, places, rounded

from qlinear_service.dtypes import DType
from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.cuda_abi import CudaDevice, CudaLaunch, Status

K = 192
"""A step and a half."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ChainCase:
    """One of the kernels of csrc/cuda/linear_chain.cu, with some rows for it."""

    name: str
    dtype: DType
    m: int


CHAINS = [
    ChainCase(f"chain_{dtype.name.lower()}_rows{rows}", dtype, m)
    for dtype in (DType.F16, DType.BF16)
    for rows, m in ((8, 5), (16, 13))
]


def chains_of(device: CudaDevice) -> list[ChainCase]:
    """Return the chains that this GPU can run."""
    return CHAINS if (device.major, device.minor) == (9, 0) else []


@dataclass
class Layer:
    """One layer, and what it must give."""

    params: LinearParams
    packed: Packed
    y: int
    """Address of the results, [m, stride]."""
    right: npt.NDArray[np.generic] | None = None
    """Null: another layer writes over it."""


def selecting(layer: Packed, n: int) -> Packed:
    """Return `layer` with results that are its inputs, over and over: small again, and exact."""
    ones = np.arange(n), np.arange(n) % K
    weights = np.zeros((n, K), np.float32)
    weights[ones] = 1
    qweight = np.full_like(layer.qweight, 0x88)
    byte, shift = places(n, K, 4)
    np.add.at(qweight, byte[ones], (1 << shift[ones]).astype(np.uint8))
    return Packed(qweight, np.ones_like(layer.scales), layer.zeros, weights)


class ChainBuilder:
    """Layers in device memory, one after the other.

    Args:
        memory: where they lie.
        case: their rows and dtypes.
    """

    def __init__(self, memory: Memory, case: ChainCase) -> None:
        self.memory, self.case = memory, case
        self.draw = np.random.default_rng(case.m)
        self.layers: list[Layer] = []

    def add(
        self, x: Floats, address: int, stride: int, n: int, *, y: int = 0, **options: Any
    ) -> Floats:
        """Add a layer that reads `x`, at `address`, and return what it gives.

        Args:
            x: [m, k].
            address: of its first row.
            stride: elements between its rows.
            n: output features.
            y: where results go; 0: to memory of their own.
            options: `bias`, `select`, and fields of the params.
        """
        m, dtype, put = self.case.m, self.case.dtype, self.memory.put
        bias, select = options.pop("bias", False), options.pop("select", False)
        params = LinearParams(
            m=m, n=n, k=x.shape[1], x_row_stride=stride, y_row_stride=n, group_size=128, bits=4,
            x_dtype=dtype, compute_dtype=dtype, scale_dtype=dtype, y_dtype=dtype,
            bias_dtype=DType.F32, threads=1,
        )  # fmt: skip
        for name, value in options.items():
            setattr(params, name, value)
        packed = drawn_layer(self.draw, params, zeros=False)
        packed = selecting(packed, n) if select else packed
        added = self.draw.integers(-9, 9, n).astype(np.float32) * bias
        found = x @ packed.weights.T + added
        right = rounded(found, params.y_dtype)
        params.x, params.qweight = address, put(packed.qweight)
        params.scales = put(encoded(packed.scales, dtype))
        params.bias = put(added) if bias else None
        params.y = y or self.memory.take(right.nbytes)
        for layer in self.layers:
            layer.right = None if layer.y == params.y else layer.right
        self.layers.append(Layer(params, packed, params.y, right))
        return found


def built(memory: Memory, device: CudaDevice, case: ChainCase) -> list[Layer]:
    """Return four layers: two that read another's results, one that writes over them."""
    n = 64 * device.sm_count  # four n-blocks for each thread block
    chain = ChainBuilder(memory, case)
    x = chain.draw.integers(-2, 3, (case.m, K)).astype(np.float32)
    address = memory.put(encoded(x, case.dtype))
    chosen = chain.add(x, address, K, n, select=True)
    first = chain.layers[0].y
    chain.add(chosen[:, :K], first, n, n - 5, bias=True, y_dtype=DType.F32)
    chain.add(chosen[:, :K], first, n, 2 * n, group_size=-1)
    chain.add(x[:, :128], address, K, n, y=first)
    return chain.layers


def launch_chain(library: ctypes.CDLL, memory: Memory, device: CudaDevice, case: ChainCase) -> str:
    """Launch twice and return "" or what is wrong."""
    layers = built(memory, device, case)
    params = (LinearParams * len(layers))(*(layer.params for layer in layers))
    if library.ql_cuda_chain_length(params, len(layers), device) != len(layers):
        return "is not one launch"
    nbytes = library.ql_cuda_workspace_bytes()
    launch = CudaLaunch(device=0, workspace=memory.take(nbytes), workspace_bytes=nbytes)
    memory.clear(launch.workspace, COUNTER_BYTES)
    for _ in range(2):
        status = library.ql_cuda_linear_chain(params, None, len(layers), launch)
        if status != Status.OK:
            return f"status {status}: {library.ql_cuda_error_text().decode()}"
    for number, layer in enumerate(layers):
        if layer.right is None:
            continue
        wrong = memory.get(layer.y, layer.right) != layer.right
        if wrong.any():
            return f"{wrong.sum()} of {wrong.size} of layer {number} are wrong"
    counters = memory.get(launch.workspace, np.empty(COUNTER_BYTES, np.uint8))
    return "counters are left behind" if counters.any() else ""
