"""Brings a layer into the runtime layout slab by slab, so that it is never in memory twice.

Codes of one byte take twice the room of packed ones, and packing moves them several times: done
for some output features at a time, what is alive besides the result stays small.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from qlinear_service.kernels import layout, packing
from qlinear_service.layers import LayerSpec, LogicalLayer, QuantizedLinear

__all__ = ["SLAB_BYTES", "Converter", "assemble"]

SLAB_BYTES = 2 << 20
"""Codes (a byte each) of one slab; smaller ones cost more calls, larger ones more memory."""


@dataclass(frozen=True, slots=True)
class Converter:
    """Where and with what codes are unpacked and packed."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Layers come out on the host all the same."""
    pack_codes: packing.PackCodes = packing.pack_codes


def assemble(
    spec: LayerSpec,
    load: Callable[[int, int], LogicalLayer],
    *,
    slab_bytes: int = SLAB_BYTES,
    using: packing.PackCodes = packing.pack_codes,
) -> QuantizedLinear:
    """Return a layer in the runtime layout, on the host.

    Args:
        spec: what it is.
        load: returns output features begin to end as a layer; begin is a multiple of 64.
        slab_bytes: see `SLAB_BYTES`.
        using: what brings codes into tile order, where `load` leaves them.
    """
    step = max(layout.PAD_N, slab_bytes // spec.k // layout.PAD_N * layout.PAD_N)
    whole: QuantizedLinear | None = None
    for begin in range(0, spec.n, step):
        end = min(begin + step, spec.n)
        slab = packing.pack(load(begin, end), using=using)
        if whole is None:
            whole = _empty_like(slab, spec)
        _copy(slab, whole.features(begin, end))
    assert whole is not None, "a layer has at least one output feature"
    return whole


def _empty_like(slab: QuantizedLinear, spec: LayerSpec) -> QuantizedLinear:
    """Return a layer of which `slab` is some output features, not filled in but for k."""
    blocks = spec.n_padded // (layout.TILE_N if spec.quantized else 1)

    def room(tensor: torch.Tensor, first: int) -> torch.Tensor:
        return torch.empty((first, *tensor.shape[1:]), dtype=tensor.dtype)

    permutation = slab.k_permutation
    return QuantizedLinear(
        spec=spec,
        qweight=room(slab.qweight, blocks),
        scales=room(slab.scales, blocks if spec.quantized else 0),
        zeros=None if slab.zeros is None else room(slab.zeros, blocks),
        bias=None if slab.bias is None else room(slab.bias, spec.n_padded),
        k_permutation=None if permutation is None else permutation.cpu(),
    )


def _copy(slab: QuantizedLinear, place: QuantizedLinear) -> None:
    for name in ("qweight", "scales", "zeros", "bias"):
        source, target = getattr(slab, name), getattr(place, name)
        if source is not None:
            target.copy_(source)
