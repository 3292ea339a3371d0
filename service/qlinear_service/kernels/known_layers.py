"""What is worked out once for a layer on a GPU: its params for the library, its measured plans."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from qlinear_service.kernels.abi import LinearParams
from qlinear_service.kernels.layer_params import layer_params, weights_fit
from qlinear_service.kernels.tuned_plans import LayerPlans, TunedPlans
from qlinear_service.layers import QuantizedLinear

__all__ = ["Known", "KnownLayers"]


class Known(NamedTuple):
    """What is known of one layer."""

    params: LinearParams
    """To be copied: activations are still to be filled in."""
    plans: LayerPlans | None
    """Measured ones; None: the planner decides alone."""


class KnownLayers:
    """Layers that were met, for as long as they live.

    Args:
        tuned: the measured plans for their GPU.
    """

    def __init__(self, tuned: TunedPlans) -> None:
        self.tuned = tuned
        self._known: WeakKeyDictionary[QuantizedLinear, Known] = WeakKeyDictionary()

    def of(self, layer: QuantizedLinear, device: torch.device) -> Known:
        """Return what is known of `layer`.

        Raises:
            ValueError: it is not on `device`.
        """
        known = self._known.get(layer)
        if known is None:
            if layer.qweight.device != device:
                raise ValueError(
                    f"layer {layer.spec.name!r} is on {layer.qweight.device}; move it with "
                    f"to_device, expected {device}"
                )
            params = layer_params(layer)
            if layer.scales.is_cuda and torch.cuda.is_current_stream_capturing():
                # Scales cannot be read now: as if they were large, and not remembered.
                return Known(params, self.tuned.of(params))
            params.weights_fit = weights_fit(layer)
            known = self._known[layer] = Known(params, self.tuned.of(params))
        return known

    def tuned_bandwidths(
        self, layers: Iterable[QuantizedLinear]
    ) -> Iterator[tuple[str, int, float]]:
        """Yield shape, rows and bytes per second for what tables say was measured of layers."""
        for layer in layers:
            spec = layer.spec
            for found in self.tuned.measured(layer_params(layer)):
                entry = found.entry
                rows_bytes = entry.m * (spec.k + spec.n) * spec.compute_dtype.itemsize
                yield spec.shape, entry.m, (layer.streamed_bytes + rows_bytes) / entry.us * 1e6
