"""What the engine has on its way as one: a batch, or those of several layers on the same rows."""

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from qlinear_service.batching import Batch
from qlinear_service.engine import gather_rows, part_rows
from qlinear_service.gpu.express import Product, row_stride
from qlinear_service.gpu.stages import LARGE_COPY_BYTES, Stage, places_of
from qlinear_service.layers import QuantizedLinear
from qlinear_service.results import BatchResult
from qlinear_service.slots import Slab

__all__ = ["Job", "result_bytes"]


class Job:
    """What is on its way, and the future of whoever waits for it: the result of each batch.

    Args:
        batch: the only one, or the first.
        layer: of it.
        loop: where it is waited for.
        others: further batches on the same rows of x, and their layers.
    """

    __slots__ = (
        *("batch", "error", "future", "gather_nanoseconds", "in_slots", "layer", "loop"),
        *("others", "stage", "x_bytes", "x_room_bytes", "x_row_bytes", "y_begins", "y_bytes"),
        "y_row_bytes",
    )

    def __init__(
        self,
        batch: Batch,
        layer: QuantizedLinear,
        loop: asyncio.AbstractEventLoop,
        others: Sequence[tuple[Batch, QuantizedLinear]] = (),
    ) -> None:
        self.batch = batch
        self.layer = layer
        self.loop = loop
        self.others = others
        self.future: asyncio.Future[list[BatchResult]] = loop.create_future()
        self.stage: Stage | None = None
        self.error: BaseException | None = None
        """Why it could not be launched, or not all of it."""
        self.in_slots = False
        """Results are written over the activations, from now on."""
        self.gather_nanoseconds = 0
        spec, key = layer.spec, batch.key
        self.x_row_bytes = spec.k * key.x_dtype.itemsize
        self.y_row_bytes = spec.n * key.output_dtype.itemsize
        self.x_bytes = batch.rows * self.x_row_bytes
        self.x_room_bytes = batch.rows * row_stride(spec.k) * key.x_dtype.itemsize
        """What x takes on the device at most."""
        self.y_bytes = batch.rows * self.y_row_bytes
        self.y_begins = [0]
        """Where the results of each batch begin."""
        if others:
            sizes = [self.y_bytes, *(result_bytes(other, each) for other, each in others)]
            self.y_begins = places_of(sizes)
            self.y_bytes = self.y_begins[-1] + sizes[-1]

    @property
    def more(self) -> list[Product]:
        """Return the further layers, as a device takes them."""
        return [Product(layer, batch.key.output_dtype) for batch, layer in self.others]

    def has_room_in(self, slab: Slab) -> bool:
        """Say whether each result may take the place of the activations it was made of."""
        fits, row_bytes = slab.room_for_result, self.y_row_bytes
        return all(
            rows == item.rows and fits(item.slot, rows * row_bytes)
            for item, _, rows in self.batch.parts
        )

    def gather(self, slab: Slab, into: torch.Tensor) -> None:
        """Copy the rows of all parts from `slab` into `into`, uint8 [x_bytes]."""
        parts = self.batch.parts
        if len(parts) == 1 and self.x_bytes >= LARGE_COPY_BYTES:
            rows = part_rows(slab, parts[0], self.x_row_bytes)
            into.copy_(torch.frombuffer(rows, dtype=torch.uint8))
        else:
            gather_rows(slab, self.batch, self.x_row_bytes, into.numpy().data.cast("B"))

    def settle(self, outcome: list[BatchResult] | BaseException) -> None:
        """Tell whoever waits, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
            self.loop.call_soon_threadsafe(functools.partial(_set, self.future, outcome))


def result_bytes(batch: Batch, layer: QuantizedLinear) -> int:
    """Return what the results of a batch take."""
    return batch.rows * layer.spec.n * batch.key.output_dtype.itemsize


def _set(future: "asyncio.Future[list[BatchResult]]", outcome: Any) -> None:
    if future.done():
        return  # whoever waited has left
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
