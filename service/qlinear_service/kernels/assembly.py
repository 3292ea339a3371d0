"""Brings a layer into the runtime layout slab by slab, so that it is never in memory twice.

Codes of one byte take twice the room of packed ones, and packing moves them several times: done
for some output features at a time, what is alive besides the result stays small.
"""

from collections.abc import Callable

import torch

from qlinear_service.kernels import layout, packing
from qlinear_service.layers import LayerSpec, LogicalLayer, QuantizedLinear

__all__ = ["SLAB_BYTES", "assemble"]

SLAB_BYTES = 8 << 20
"""Codes (a byte each) of one slab; smaller ones cost more calls, larger ones more memory."""


def assemble(
    spec: LayerSpec,
    load: Callable[[int, int], LogicalLayer],
    *,
    slab_bytes: int = SLAB_BYTES,
    device: torch.device | None = None,
) -> QuantizedLinear:
    """Return a layer in the runtime layout.

    Args:
        spec: what it is.
        load: returns output features begin to end as a layer; begin is a multiple of 64.
        slab_bytes: see `SLAB_BYTES`.
        device: where the result lies; None is the host. Slabs are packed where they come from.
    """
    step = max(layout.PAD_N, slab_bytes // spec.k // layout.PAD_N * layout.PAD_N)
    whole: QuantizedLinear | None = None
    for begin in range(0, spec.n, step):
        end = min(begin + step, spec.n)
        slab = packing.pack(load(begin, end))
        if whole is None:
            whole = _empty_like(slab, spec, device or torch.device("cpu"))
        _copy(slab, whole.features(begin, end))
    assert whole is not None, "a layer has at least one output feature"
    return whole


def _empty_like(slab: QuantizedLinear, spec: LayerSpec, device: torch.device) -> QuantizedLinear:
    """Return a layer of which `slab` is some output features, not filled in but for k."""
    blocks = spec.n_padded // (layout.TILE_N if spec.quantized else 1)

    def room(tensor: torch.Tensor, first: int) -> torch.Tensor:
        return torch.empty((first, *tensor.shape[1:]), dtype=tensor.dtype, device=device)

    permutation = slab.k_permutation
    return QuantizedLinear(
        spec=spec,
        qweight=room(slab.qweight, blocks),
        scales=room(slab.scales, blocks if spec.quantized else 0),
        zeros=None if slab.zeros is None else room(slab.zeros, blocks),
        bias=None if slab.bias is None else room(slab.bias, spec.n_padded),
        k_permutation=None if permutation is None else permutation.to(device),
    )


def _copy(slab: QuantizedLinear, place: QuantizedLinear) -> None:
    for name in ("qweight", "scales", "zeros", "bias"):
        source, target = getattr(slab, name), getattr(place, name)
        if source is not None:
            target.copy_(source)
