"""What the native dispatcher needs of a GPU for each batch in flight: buffers and events.

How large batches may be follows from it. Knows no queue and no slab.
"""

from collections.abc import Sequence
from typing import Any

from qlinear_service.dispatch.abi import DispatchStage
from qlinear_service.gpu.express import event_handle, row_stride
from qlinear_service.gpu.stages import TABLE_BYTES
from qlinear_service.gpu.streams import CudaStreams
from qlinear_service.gpu.ways import TABLE_ROWS
from qlinear_service.layers import QuantizedLinear

__all__ = ["Room", "rows_of_batches"]

MOST_X_BYTES, MOST_Y_BYTES = 64 << 20, 128 << 20
"""Of a batch that the dispatcher sends; larger ones are the engine's."""

ITEM_BYTES = 2
"""Of x and results, as far as room is made for them: float32 has it for half the rows."""


def _bytes_of_row(layers: Sequence[QuantizedLinear]) -> tuple[int, int]:
    """Return what a row of x and one of the results take of any of these layers."""
    specs = [layer.spec for layer in layers]
    widest_x = max((row_stride(spec.k) for spec in specs), default=1)
    widest_y = max((spec.n for spec in specs), default=1)
    return ITEM_BYTES * widest_x, ITEM_BYTES * widest_y


def rows_of_batches(layers: Sequence[QuantizedLinear], asked: int) -> int:
    """Return the most rows of a batch, so that the dispatcher can send all that it forms itself.

    With as many rows a product takes all but a few percent of the time for each that it takes with
    more, and a batch that comes back to the engine costs far more than that.

    Args:
        layers: all of them.
        asked: most rows that anybody wants.
    """
    x_bytes, y_bytes = _bytes_of_row(layers)
    return max(1, min(asked, TABLE_ROWS, MOST_X_BYTES // x_bytes, MOST_Y_BYTES // y_bytes))


class Room:
    """Buffers and events of batches in flight, which live as long as this.

    Args:
        streams: the GPU.
        layers: whose batches find room.
    """

    def __init__(self, streams: CudaStreams, layers: Sequence[QuantizedLinear]) -> None:
        self._streams = streams
        x_row, y_row = _bytes_of_row(layers)
        self._x_bytes = min(TABLE_ROWS * x_row, MOST_X_BYTES)
        self._y_bytes = min(TABLE_ROWS * y_row, MOST_Y_BYTES)
        self._kept: list[Any] = []

    def stage(self) -> DispatchStage:
        """Return what one more batch needs."""
        streams = self._streams
        x, y = streams.device_memory(self._x_bytes), streams.device_memory(self._y_bytes)
        table, marks = streams.host_memory(TABLE_BYTES), streams.new_marks()
        compute = streams.in_order[1]
        events = [streams.new_event(blocks=blocks) for blocks in (False, False, not streams.spins)]
        untimed = [event_handle(event, compute) for event in events]
        self._kept += (x, y, table, marks, events)
        return DispatchStage(
            x=x.data_ptr(),
            y=y.data_ptr(),
            x_bytes=self._x_bytes,
            y_bytes=self._y_bytes,
            table=table.data_ptr(),
            in_start=event_handle(marks.in_start, compute),
            in_stop=event_handle(marks.in_stop, compute),
            kernel_start=event_handle(marks.kernel[0], compute),
            kernel_stop=event_handle(marks.kernel[1], compute),
            out_start=event_handle(marks.out_start, compute),
            out_stop=event_handle(marks.out_stop, compute),
            **dict(zip(("in_done", "kernel_done", "out_done"), untimed, strict=True)),
        )
