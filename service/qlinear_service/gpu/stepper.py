"""Runs single batches on a GPU for the cost curve: each of the three steps as the engine takes it.

Each row lies in a slot of its own, as those of one-row calls do. Knows no queue; blocking, for the
thread that loads.
"""

import torch

from qlinear_service.config import size_class
from qlinear_service.cost import Steps
from qlinear_service.dtypes import DType
from qlinear_service.gpu.express import Trip, row_stride
from qlinear_service.gpu.streams import Device
from qlinear_service.gpu.ways import AUTO, Batched, way_of
from qlinear_service.layers import QuantizedLinear

__all__ = ["DeviceStepper"]

X_DTYPE = DType.F16


class DeviceStepper:
    """Batches on one device, in a stage of its own that goes with this object.

    Args:
        device: where the layers are.
        mode: how rows may travel, see ways.py.
    """

    def __init__(self, device: Device, mode: str = AUTO) -> None:
        self._device = device
        self._mode = mode
        self._stage = device.new_stage()
        self._slots = torch.empty(0, dtype=torch.uint8)

    def steps(self, layer: QuantizedLinear, rows: int) -> Steps:
        """Compute `rows` rows of `layer` and wait for them.

        Raises:
            RuntimeError: the device has no room, or the batch has failed.
        """
        spec, stage, device = layer.spec, self._stage, self._device
        x_bytes, y_bytes = rows * spec.k * X_DTYPE.itemsize, rows * spec.n * X_DTYPE.itemsize
        x_room_bytes = rows * row_stride(spec.k) * X_DTYPE.itemsize
        if not stage.fits(x_room_bytes, y_bytes):
            stage.grow(x_room_bytes, y_bytes)
        can_gather = device.can_gather(layer)
        can_scatter = can_gather and device.scatters
        way = way_of(Batched(rows, y_bytes, can_gather, lambda: can_scatter), self._mode)
        parts = [stage.x.host.data_ptr(), rows]
        if way.gather:
            y_row_bytes = y_bytes // rows if way.scatter else 0
            parts = self._parts(rows, size_class(max(x_bytes // rows, y_row_bytes)))
        else:
            stage.x.host[:x_bytes].zero_()
        trip = Trip(
            layer=layer, stage=stage, parts=parts, rows=rows, x_dtype=X_DTYPE, y_dtype=X_DTYPE,
            way=way, alone=False,
        )  # fmt: skip
        device.submit(trip)
        device.wait(stage.marks)
        times = device.times(stage.marks)
        return Steps(rows, times.to_device / 1e9, times.kernel / 1e9, times.from_device / 1e9)

    def _parts(self, rows: int, slot_bytes: int) -> list[int]:
        """Return a slot for each row, in memory that kernels see."""
        if len(self._slots) < rows * slot_bytes:
            self._slots = self._device.host_memory(rows * slot_bytes).zero_()
        begin = self._slots.data_ptr()
        parts: list[int] = []
        for row in range(rows):
            parts += (begin + row * slot_bytes, 1)
        return parts
