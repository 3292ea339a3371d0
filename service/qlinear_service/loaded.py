"""What loading hands to the server: layers, kernels, and what was measured of the machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from qlinear_service.cost import CostCurve
from qlinear_service.gpu.streams import Device
from qlinear_service.kernels.backends import Kernels
from qlinear_service.layers import LayerRegistry
from qlinear_service.measured import MeasuredDevice, Telemetry
from qlinear_service.roofline import Roofline

__all__ = ["Loaded", "Replica"]


class Replica(NamedTuple):
    """One of several devices that hold the same layers."""

    name: str
    device: Device
    registry: LayerRegistry
    """The layers as they lie there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What the server needs to compute."""

    registry: LayerRegistry
    kernels: Kernels
    roofline: Roofline | None = None
    """What this machine was measured to do, where that was asked for."""
    curves: Mapping[str, CostCurve] = field(default_factory=dict)
    """What batches cost, by `LayerSpec.shape`, where that was measured."""
    gpu: Device | None = None
    """Where the layers are; None is the host's memory."""
    telemetry: Telemetry | None = None
    """What the GPU says of itself."""
    tuned_bandwidths: tuple[tuple[str, int, float], ...] = ()
    """Shape, rows and bytes per second of loaded layers, as the tables of measured plans say."""
    replicas: tuple[Replica, ...] = ()
    """Devices that hold all layers each, `gpu` the first of them, where there are several."""
    devices: tuple[MeasuredDevice, ...] = ()
    """What each of several devices holds and can do."""

    def measured(self, name: str) -> tuple[MeasuredDevice, ...]:
        """Return what metrics are to know of each device; `name` is that of the only one."""
        only = MeasuredDevice(
            name=name,
            roofline=self.roofline,
            telemetry=self.telemetry,
            tuned_bandwidths=self.tuned_bandwidths,
        )
        return self.devices or (only,)
