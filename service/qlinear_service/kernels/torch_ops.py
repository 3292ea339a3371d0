"""The same kernels inside a torch model: `qlinear::linear`, `qlinear::gather`, and a module.

The operations know their shapes without data, so they work with fake tensors, torch.compile and
CUDA graphs; nothing is allocated but the result. For inference: there is no gradient.
"""

import threading
from collections.abc import Callable

import torch

from qlinear_service.dtypes import DType
from qlinear_service.kernels import build, layout
from qlinear_service.kernels.backends import CpuKernels
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.kernels.torch_types import from_torch, to_torch
from qlinear_service.kernels.tuned_plans import read_tables
from qlinear_service.layers import LayerSpec, QuantizedLinear

__all__ = ["QuantizedLinearModule", "gather", "linear", "use_kernels"]

_lock = threading.Lock()
_kernels: dict[torch.device, CpuKernels | CudaKernels] = {}


def use_kernels(kernels: CpuKernels | CudaKernels) -> None:
    """Compute with `kernels` on their device from now on.

    Without it the operations find or build a library at their first call on a device.
    """
    device = kernels.device if isinstance(kernels, CudaKernels) else torch.device("cpu")
    with _lock:
        _kernels[device] = kernels


def _kernels_on(device: torch.device) -> CpuKernels | CudaKernels:
    found = _kernels.get(device)
    if found is None:
        with _lock:
            found = _kernels.get(device)
            if found is None:
                found = _kernels[device] = _default_kernels(device)
    return found


def _default_kernels(device: torch.device) -> CpuKernels | CudaKernels:
    cache_dir = build.default_cache_dir()
    if device.type == "cpu":
        with build.cpu_library(cache_dir) as path:
            return CpuKernels(path, threads=torch.get_num_threads())
    # Not above: machines without a GPU need neither.
    from qlinear_service.kernels.architectures import chosen_architectures
    from qlinear_service.kernels.cuda_library import cuda_library

    with cuda_library(cache_dir, chosen_architectures(("native",))) as path:
        return CudaKernels(path, device=device.index or 0, tables=read_tables(cache_dir))


def _linear(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    bits: int,
    group_size: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return y [..., n] = x [..., k] W^T + bias of a layer in the runtime layout.

    Args:
        x: float16, bfloat16 or float32; float32 is rounded to bfloat16 if `scales` are, else to
            float16. Rows that are not contiguous are copied.
        qweight: uint8 [n_padded / 16, k_padded / 64, tile bytes], see csrc/layout.h.
        scales: [n_padded / 16, groups, 16].
        zeros: uint8, the shape of `scales`; None is 2**(bits - 1) everywhere.
        bias: [n] or more.
        n: output features.
        k: input features.
        bits: 4 or 8.
        group_size: 32, 64, 128, or -1 for the whole column.
        out_dtype: of y.
    """
    layer = QuantizedLinear(
        spec=LayerSpec(
            model="torch",
            module="linear",
            n=n,
            k=k,
            bits=bits,
            group_size=group_size,
            symmetric=zeros is None,
            has_bias=bias is not None,
            scale_dtype=from_torch(scales.dtype),
        ),
        qweight=qweight,
        scales=scales,
        zeros=zeros,
        bias=bias,
    )
    _check(layer)
    if x.device != qweight.device:
        raise ValueError(f"x is on {x.device}; expected {qweight.device}, where the layer is")
    y = _kernels_on(x.device).linear(layer, _rows(x, k), from_torch(out_dtype))
    return y.view(*x.shape[:-1], n)


def _gather(x: torch.Tensor, k_permutation: torch.Tensor) -> torch.Tensor:
    """Return x [..., k] with column i taken from column k_permutation[i], int32 [k].

    Values of k_permutation must be 0 to k - 1 and are not looked at, which would wait for the GPU.
    """
    k = k_permutation.shape[0]
    if k_permutation.dtype != torch.int32 or k_permutation.device != x.device:
        raise ValueError(
            f"k_permutation is {k_permutation.dtype} on {k_permutation.device}; expected "
            f"torch.int32 on {x.device}"
        )
    return _kernels_on(x.device).gather(_rows(x, k), k_permutation).view(x.shape)


def _rows(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return x [m, k] with contiguous rows."""
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x is {list(x.shape)}; expected [..., {k}]")
    rows = x.reshape(-1, k)
    whole = rows.stride(-1) == 1 and (rows.shape[0] < 2 or rows.stride(0) >= k)
    return rows if whole else rows.contiguous()


def _check(layer: QuantizedLinear) -> None:
    """Refuse tensors that the kernels would read beyond the end of, or on another device.

    Raises:
        ValueError: a tensor has another shape, type or place than the sizes say.
    """
    spec = layer.spec
    if spec.bits not in layout.BITS or spec.group_size not in layout.GROUP_SIZES:
        raise ValueError(
            f"bits is {spec.bits} and group_size {spec.group_size}; expected bits of "
            f"{layout.BITS} and group sizes of {layout.GROUP_SIZES}"
        )
    blocks, k_tiles = spec.n_padded // layout.TILE_N, spec.k_padded // layout.TILE_K
    columns = (blocks, spec.groups, layout.TILE_N)
    expected = {
        "qweight": (layer.qweight, torch.uint8, (blocks, k_tiles, layout.tile_bytes(spec.bits))),
        "scales": (layer.scales, layer.scales.dtype, columns),
        "zeros": (layer.zeros, torch.uint8, columns),
    }
    for name, (tensor, dtype, shape) in expected.items():
        if tensor is None:
            continue
        right = tensor.dtype == dtype and tuple(tensor.shape) == shape and tensor.is_contiguous()
        if not right or tensor.device != layer.qweight.device:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; expected "
                f"{dtype} {list(shape)}, contiguous, on {layer.qweight.device}"
            )
    bias = layer.bias
    if bias is not None and (
        bias.dim() != 1
        or bias.shape[0] < spec.n
        or not bias.is_contiguous()
        or bias.device != layer.qweight.device
    ):
        raise ValueError(
            f"bias is {list(bias.shape)} on {bias.device}; expected [{spec.n}] or more, "
            f"contiguous, on {layer.qweight.device}"
        )


linear = torch.library.custom_op("qlinear::linear", _linear, mutates_args=(), device_types="cpu")
linear.register_kernel("cuda")(_linear)
gather = torch.library.custom_op("qlinear::gather", _gather, mutates_args=(), device_types="cpu")
gather.register_kernel("cuda")(_gather)


@linear.register_fake
def _linear_of_shapes(
    x: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    k: int,
    bits: int,
    group_size: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if x.shape[-1] != k:
        raise ValueError(f"x is {list(x.shape)}; expected [..., {k}]")
    return x.new_empty((*x.shape[:-1], n), dtype=out_dtype)


@gather.register_fake
def _gather_of_shapes(x: torch.Tensor, k_permutation: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


class QuantizedLinearModule(torch.nn.Module):
    """One layer as a module: y = module(x) for x [..., k].

    Moves between devices like any module. Its tensors keep their dtypes whatever the model is
    converted to: codes and scales belong together.

    Args:
        layer: in the runtime layout.
        output_dtype: of y; None is that of x.
    """

    def __init__(self, layer: QuantizedLinear, *, output_dtype: DType | None = None) -> None:
        super().__init__()
        self.spec = layer.spec
        self.output_dtype = None if output_dtype is None else to_torch(output_dtype)
        self.qweight: torch.Tensor
        self.scales: torch.Tensor
        self.zeros: torch.Tensor | None
        self.bias: torch.Tensor | None
        self.k_permutation: torch.Tensor | None
        for name in ("qweight", "scales", "zeros", "bias", "k_permutation"):
            self.register_buffer(name, getattr(layer, name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y [..., n]."""
        if self.k_permutation is not None:
            x = gather(x, self.k_permutation)
        spec = self.spec
        y: torch.Tensor = linear(
            x, self.qweight, self.scales, self.zeros, self.bias, spec.n, spec.k, spec.bits,
            spec.group_size, self.output_dtype or x.dtype,
        )  # fmt: skip
        return y

    def extra_repr(self) -> str:
        """Return what print(model) shows of it."""
        return f"n={self.spec.n}, k={self.spec.k}, {self.spec.shape}"

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> "QuantizedLinearModule":
        super()._apply(lambda tensor: _kept_dtype(tensor, fn(tensor)), recurse)  # type: ignore[no-untyped-call]
        return self


def _kept_dtype(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return after if after.dtype == before.dtype else before.to(after.device)
