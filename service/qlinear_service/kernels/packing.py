"""Turns a layer from the model's own order into the runtime layout and back, exactly.

Works on whole tensors by naming the digits of every index (see csrc/layout.h for the picture) and
permuting them; `layout.code_place` is the same map for one code, and tests compare the two.
Padding is chosen so that it multiplies to exactly zero: scale 0 beyond n and beyond the last
group, and code = zero point in the rest of a group that ends short.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qlinear_service.kernels import layout
from qlinear_service.kernels.torch_types import to_torch
from qlinear_service.layers import LayerSpec, LogicalLayer, QuantizedLinear

__all__ = [
    "PackCodes",
    "pack",
    "pack_codes",
    "pack_columns",
    "stored_groups",
    "unpack",
    "unpack_codes",
    "unpack_columns",
]


PackCodes = Callable[[torch.Tensor, int], torch.Tensor]
"""What `pack_codes` is; the compiled kernels have one that is faster."""


@dataclass(frozen=True, slots=True)
class _Digits:
    """How the digits of [k, n] are arranged: `split` names them in order, `order` permutes them."""

    split: tuple[int, ...]
    order: tuple[int, ...]


def _digits(bits: int, k_padded: int, n_padded: int) -> _Digits:
    k_tiles, n_blocks = k_padded // layout.TILE_K, n_padded // layout.TILE_N
    if bits == 4:
        # k: tile, block, half, pair t, odd;  n: block, half, row g  ->  the nibble varies fastest.
        return _Digits((k_tiles, 4, 2, 4, 2, n_blocks, 2, 8), (5, 0, 7, 3, 1, 4, 2, 6))
    # k: tile, vector, block, half, pair t, odd;  n: block, half, row g.
    return _Digits((k_tiles, 2, 2, 2, 4, 2, n_blocks, 2, 8), (6, 0, 1, 8, 4, 2, 3, 5, 7))


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes in tile order.

    Args:
        codes: uint8 [k_padded, n_padded], each below 2**bits.
        bits: 4 or 8.

    Returns:
        uint8 [n_padded / 16, k_padded / 64, tile bytes].
    """
    k_padded, n_padded = codes.shape
    digits = _digits(bits, k_padded, n_padded)
    moved = codes.reshape(digits.split).permute(digits.order)
    if bits == 4:
        moved = moved[..., 0] | (moved[..., 1] << 4)
    shape = (n_padded // layout.TILE_N, k_padded // layout.TILE_K, layout.tile_bytes(bits))
    return moved.reshape(shape).contiguous()


def unpack_codes(qweight: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo `pack_codes`: tiles of uint8 [n / 16, k / 64, tile bytes] -> codes [k, n], padded."""
    n_padded, k_padded = qweight.shape[0] * layout.TILE_N, qweight.shape[1] * layout.TILE_K
    digits = _digits(bits, k_padded, n_padded)
    codes = torch.stack((qweight & 0xF, qweight >> 4), dim=-1) if bits == 4 else qweight
    moved = codes.reshape([digits.split[axis] for axis in digits.order])
    inverse = [digits.order.index(axis) for axis in range(len(digits.order))]
    return moved.permute(inverse).reshape(k_padded, n_padded).contiguous()


def pack_columns(values: torch.Tensor) -> torch.Tensor:
    """Return scales or zero points [groups, n_padded] in the order [n_padded / 16, groups, 16]."""
    groups, n_padded = values.shape
    split = values.reshape(groups, n_padded // layout.TILE_N, 2, 8)
    return split.permute(1, 0, 3, 2).reshape(-1, groups, layout.TILE_N).contiguous()


def unpack_columns(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_columns`: [n_padded / 16, groups, 16] -> [groups, n_padded]."""
    blocks, groups, _ = packed.shape
    split = packed.reshape(blocks, groups, 8, 2)
    return split.permute(1, 0, 3, 2).reshape(groups, blocks * layout.TILE_N).contiguous()


def pack(layer: LogicalLayer, *, using: PackCodes = pack_codes) -> QuantizedLinear:
    """Return `layer` padded and in the runtime layout, on the device of its codes.

    Args:
        layer: what a checkpoint holds.
        using: what brings padded codes into tile order.

    Raises:
        ValueError: a tensor's shape or dtype contradicts `layer.spec`.
    """
    spec = layer.spec
    _check(layer)
    bias = None if layer.bias is None else _padded(layer.bias, (spec.n_padded,))
    if not spec.quantized:
        weight = _padded(layer.codes.T, (spec.n_padded, spec.k))
        return QuantizedLinear(spec=spec, qweight=weight, scales=layer.scales, bias=bias)
    columns = (spec.groups, spec.n_padded)
    middle = 1 << (spec.bits - 1)
    zeros = None if layer.zeros is None else _padded(layer.zeros, columns, middle)
    return QuantizedLinear(
        spec=spec,
        qweight=using(_padded_codes(layer, zeros), spec.bits),
        scales=pack_columns(_padded(layer.scales, columns)),
        zeros=None if zeros is None else pack_columns(zeros),
        bias=bias,
        k_permutation=layer.k_permutation,
    )


def _padded(tensor: torch.Tensor, shape: tuple[int, ...], value: int = 0) -> torch.Tensor:
    """Return `tensor` contiguous and with `value` behind its end in each dimension."""
    if tuple(tensor.shape) == shape:
        return tensor.contiguous()
    whole = torch.full(shape, value, dtype=tensor.dtype, device=tensor.device)
    whole[tuple(slice(size) for size in tensor.shape)] = tensor
    return whole


def _padded_codes(layer: LogicalLayer, zeros: torch.Tensor | None) -> torch.Tensor:
    """Return codes [k_padded, n_padded]: beyond the stored ones, each is its zero point."""
    spec = layer.spec
    shape = (spec.k_padded, spec.n_padded)
    codes = _padded(layer.codes, shape, 1 << (spec.bits - 1))
    if zeros is not None and spec.k < spec.k_padded:
        rows_per_group = spec.k_padded if spec.group_size == -1 else spec.group_size
        group = torch.arange(spec.k, spec.k_padded, device=codes.device) // rows_per_group
        # A stored zero point may lie one beyond the largest code (files of AutoGPTQ 0.7.1); such a
        # group's padding cannot be exactly zero, but it only ever meets activations that are.
        codes[spec.k :] = zeros.clamp(max=2**spec.bits - 1)[group]
    return codes


def unpack(layer: QuantizedLinear) -> LogicalLayer:
    """Undo `pack` exactly: every code, scale, zero point and bias of the logical layer."""
    spec = layer.spec
    if not spec.quantized:
        bias = None if layer.bias is None else layer.bias[: spec.n].clone()
        return LogicalLayer(
            spec=spec, codes=layer.qweight[: spec.n].T, scales=layer.scales, bias=bias
        )
    groups = stored_groups(spec)
    return LogicalLayer(
        spec=spec,
        codes=unpack_codes(layer.qweight, spec.bits)[: spec.k, : spec.n].contiguous(),
        scales=unpack_columns(layer.scales)[:groups, : spec.n].contiguous(),
        zeros=(
            None
            if layer.zeros is None
            else unpack_columns(layer.zeros)[:groups, : spec.n].contiguous()
        ),
        bias=None if layer.bias is None else layer.bias[: spec.n].clone(),
        k_permutation=layer.k_permutation,
    )


def stored_groups(spec: LayerSpec) -> int:
    """Return the number of groups that hold real input features, padding groups left out."""
    return 1 if spec.group_size == -1 else -(-spec.k // spec.group_size)


def _check(layer: LogicalLayer) -> None:
    spec = layer.spec
    if spec.quantized and (
        spec.bits not in layout.BITS or spec.group_size not in layout.GROUP_SIZES
    ):
        raise ValueError(
            f"{spec.name}: bits {spec.bits}, group_size {spec.group_size}; the layout holds bits "
            f"{layout.BITS} and group sizes {layout.GROUP_SIZES}"
        )
    columns = (stored_groups(spec), spec.n)
    dtype_of_scales = to_torch(spec.scale_dtype)
    dtype_of_codes = torch.uint8 if spec.quantized else dtype_of_scales
    expected = {
        "codes": (layer.codes, dtype_of_codes, (spec.k, spec.n)),
        "scales": (layer.scales, dtype_of_scales, columns if spec.quantized else (0,)),
        "zeros": (layer.zeros, torch.uint8, columns),
        "bias": (layer.bias, None, (spec.n,)),
        "k_permutation": (layer.k_permutation, torch.int32, (spec.k,)),
    }
    for name, (tensor, dtype, shape) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or (dtype is not None and tensor.dtype != dtype):
            raise ValueError(
                f"{spec.name}: {name} is {tensor.dtype} {list(tensor.shape)}; "
                f"expected {dtype or 'a float type'} {list(shape)}"
            )
    if (layer.zeros is None) != spec.symmetric or (layer.bias is None) == spec.has_bias:
        raise ValueError(f"{spec.name}: zeros or bias contradict symmetric or has_bias")
    if (layer.k_permutation is None) == spec.has_k_permutation:
        raise ValueError(f"{spec.name}: k_permutation contradicts has_k_permutation")
