"""Runs single batches on a GPU for the cost curve: each of the three steps as the engine takes it.

Knows no queue; blocking, for the thread that loads.
"""

import torch

from qlinear_service.cost import Steps
from qlinear_service.dtypes import DType
from qlinear_service.gpu.stages import Stage
from qlinear_service.gpu.streams import Device
from qlinear_service.layers import QuantizedLinear

__all__ = ["DeviceStepper"]

X_DTYPE = DType.F16


class DeviceStepper:
    """Batches on one device, in a stage of its own that goes with this object."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stage = Stage(device)

    def steps(self, layer: QuantizedLinear, rows: int) -> Steps:
        """Compute `rows` rows of `layer` and wait for them.

        Raises:
            RuntimeError: the device has no room, or the batch has failed.
        """
        spec, stage, device = layer.spec, self._stage, self._device
        x_bytes, y_bytes = rows * spec.k * X_DTYPE.itemsize, rows * spec.n * X_DTYPE.itemsize
        if not stage.fits(x_bytes, y_bytes):
            stage.grow(device, x_bytes, y_bytes)
        stage.x.host[:x_bytes].zero_()
        x, y = stage.x.device[:x_bytes], stage.y.device[:y_bytes]
        device.copy_in(stage.x.host[:x_bytes], x, stage.marks)
        x_rows = x.view(torch.float16).view(rows, spec.k)
        y_rows = y.view(torch.float16).view(rows, spec.n)
        device.multiply(layer, x_rows, y_rows, X_DTYPE, stage.marks)
        device.copy_out(y, stage.y.host[:y_bytes], stage.marks)
        device.wait(stage.marks)
        times = device.times(stage.marks)
        return Steps(rows, times.to_device / 1e9, times.kernel / 1e9, times.from_device / 1e9)
