"""Brings a layer into the runtime layout slab by slab, so that it is never in memory twice.

Codes of one byte take twice the room of packed ones, and packing moves them several times: done
for some output features at a time, what is alive besides the result stays small.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from qlinear_service.kernels import layout, packing
from qlinear_service.layers import LayerSpec, LogicalLayer, QuantizedLinear

__all__ = ["SLAB_BYTES", "Converter", "Load", "Slabs", "assemble", "slabs"]

_TENSORS = ("qweight", "scales", "zeros", "bias", "k_permutation")

SLAB_BYTES = 2 << 20
"""Codes (a byte each) of one slab; smaller ones cost more calls, larger ones more memory."""


@dataclass(frozen=True, slots=True)
class Converter:
    """Where and with what codes are unpacked and packed."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Layers come out on the host all the same."""
    pack_codes: packing.PackCodes = packing.pack_codes


Load = Callable[[int, int], LogicalLayer]
"""Returns output features begin to end as a layer of their own; begin is a multiple of 64."""


@dataclass(frozen=True, slots=True)
class Slabs:
    """A layer in the runtime layout, some output features after the other."""

    spec: LayerSpec
    """Of all of them."""
    parts: Iterator[QuantizedLinear]
    """In order, on the host; each but the last has a multiple of 64 output features."""


def slabs(
    spec: LayerSpec,
    load: Load,
    *,
    slab_bytes: int = SLAB_BYTES,
    using: packing.PackCodes = packing.pack_codes,
) -> Iterator[QuantizedLinear]:
    """Yield the slabs of a layer, each loaded and packed when it is asked for.

    Args:
        spec: what the layer is.
        load: where its parts come from.
        slab_bytes: see `SLAB_BYTES`.
        using: what brings codes into tile order, where `load` leaves them.
    """
    step = max(layout.PAD_N, slab_bytes // spec.k // layout.PAD_N * layout.PAD_N)
    for begin in range(0, spec.n, step):
        packed = packing.pack(load(begin, min(begin + step, spec.n)), using=using)
        tensors = {name: getattr(packed, name) for name in _TENSORS}
        yield replace(packed, **{name: t.cpu() for name, t in tensors.items() if t is not None})


def assemble(
    spec: LayerSpec,
    load: Load,
    *,
    slab_bytes: int = SLAB_BYTES,
    using: packing.PackCodes = packing.pack_codes,
) -> QuantizedLinear:
    """Return a layer in the runtime layout, on the host, put together from its `slabs`."""
    whole: QuantizedLinear | None = None
    begin = 0
    for slab in slabs(spec, load, slab_bytes=slab_bytes, using=using):
        if whole is None:
            whole = _empty_like(slab, spec)
        end = begin + slab.spec.n
        _copy(slab, whole.features(begin, end))
        begin = end
    assert whole is not None, "a layer has at least one output feature"
    return whole


def _empty_like(slab: QuantizedLinear, spec: LayerSpec) -> QuantizedLinear:
    """Return a layer of which `slab` is some output features, not filled in but for k."""
    blocks = spec.n_padded // (layout.TILE_N if spec.quantized else 1)

    def room(tensor: torch.Tensor, first: int) -> torch.Tensor:
        return torch.empty((first, *tensor.shape[1:]), dtype=tensor.dtype)

    return QuantizedLinear(
        spec=spec,
        qweight=room(slab.qweight, blocks),
        scales=room(slab.scales, blocks if spec.quantized else 0),
        zeros=None if slab.zeros is None else room(slab.zeros, blocks),
        bias=None if slab.bias is None else room(slab.bias, spec.n_padded),
        k_permutation=slab.k_permutation,
    )


def _copy(slab: QuantizedLinear, place: QuantizedLinear) -> None:
    for name in ("qweight", "scales", "zeros", "bias"):
        source, target = getattr(slab, name), getattr(place, name)
        if source is not None:
            target.copy_(source)
