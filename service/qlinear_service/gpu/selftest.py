"""Compares every kernel that this GPU can take with the reference, before anything is served.

Each kind of loaded layer in every way in which its batches can be computed; then, on made-up
layers, every kernel that none of them has taken. The reference is computed with torch's float32,
on the same GPU: its own kernels have nothing in common with ours.
"""

import itertools
from collections.abc import Iterable, Iterator

import torch

from qlinear_service.dtypes import DType
from qlinear_service.gpu.made_up import made_up_layer
from qlinear_service.kernels import layout
from qlinear_service.kernels.cuda import CudaKernels
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import QuantizedLinear
from qlinear_service.selftest import SLAB_FEATURES, check_form, compare_features, kind_of

__all__ = ["run_gpu_self_test"]

WHOLE_ROWS = 13
"""Rows of the test that looks at every output feature of a layer."""

ROWS = (1, 3, 9, WHOLE_ROWS, 17, 30, 33, 61, 77, 130, 250, 512, 1030)
"""Between any two that the planner treats differently, with ragged ends of tiles."""

MOST_RESULT_BYTES = 256 << 20
"""Of float32 results of one test: large layers are tested with fewer rows, and the kernels for
more of them on other layers."""

SIZES = ((64, 1024), (4096, 4096), (192, 11008), (8192, 512))
"""n and k of made-up layers: few and many features of both kinds take different kernels."""

FORMATS = ((128, DType.F16), (32, DType.F16), (64, DType.BF16), (-1, DType.F32))
"""Group sizes and scales of made-up layers. Short groups have both dtypes in which weights may be
rounded, beside every size: kernels that round take no scales of another dtype than x's."""

Path = tuple[int, ...]


def run_gpu_self_test(kernels: CudaKernels, layers: Iterable[QuantizedLinear]) -> int:
    """Compare `kernels` with the reference; return how many kinds of layers were tested.

    Args:
        kernels: on one GPU.
        layers: there; they may be none.

    Raises:
        SelfTestError: an answer is further from the reference than rounding explains; the text
            names the kernel.
    """
    kinds: set[tuple[object, ...]] = set()
    seen: set[int] = set()
    for layer in layers:
        kind = kind_of(layer.spec)
        if kind in kinds:
            continue
        kinds.add(kind)
        paths: set[Path] = set()
        _test(kernels, layer, WHOLE_ROWS, DType.F16, everywhere=True)
        for rows, dtype in itertools.product(ROWS, DType):
            path = _path(kernels, layer, rows, dtype)
            if path not in paths and rows * layer.spec.n * 4 <= MOST_RESULT_BYTES:
                _test(kernels, layer, rows, dtype)
                paths.add(path)
                seen.add(path[0])
    for layer in _made_up(kernels.device):
        kinds.add(kind_of(layer.spec))
        for rows, dtype in itertools.product(ROWS, (DType.F16, DType.BF16)):
            kernel = _path(kernels, layer, rows, dtype)[0]
            if kernel not in seen:
                _test(kernels, layer, rows, dtype)
                seen.add(kernel)
    return len(kinds)


def _made_up(device: torch.device) -> Iterator[QuantizedLinear]:
    """Yield layers of every format, each of which is let go before the next."""
    formats = itertools.product(SIZES, layout.BITS, FORMATS)
    for number, ((n, k), bits, (group_size, scale_dtype)) in enumerate(formats):
        yield made_up_layer(
            n=n,
            k=k,
            bits=bits,
            group_size=group_size,
            symmetric=number % 2 == 0,
            scale_dtype=scale_dtype,
            device=device,
        )


def _path(kernels: CudaKernels, layer: QuantizedLinear, rows: int, dtype: DType) -> Path:
    """Return what tells ways of computing apart; first the number of the kernel."""
    plan = kernels.plan(layer, rows, dtype, dtype)
    return (plan.kernel, plan.token_blocks, plan.whole_tiles, plan.m_tiles > 1, dtype)


def _test(
    kernels: CudaKernels,
    layer: QuantizedLinear,
    rows: int,
    dtype: DType,
    *,
    everywhere: bool = False,
) -> None:
    """Compute some rows and compare all features, or those at both ends."""
    spec = layer.spec
    draw = torch.Generator(kernels.device).manual_seed(spec.k)
    x = torch.randn((rows, spec.k), generator=draw, device=kernels.device).to(to_torch(dtype))
    kernel = kernels.plan(layer, rows, dtype, dtype).kernel
    who = f"GPU kernel {kernels.library.ql_cuda_kernel_name(kernel).decode()!r} (m={rows})"
    y = kernels.linear(layer, x, dtype)
    kernels.wait()
    check_form(who, layer, x, y)
    begins = range(0, spec.n, SLAB_FEATURES)
    for begin in begins if everywhere else sorted({begins[0], begins[-1]}):
        end = min(begin + SLAB_FEATURES, spec.n)
        compare_features(who, layer, x, y, begin=begin, end=end)
