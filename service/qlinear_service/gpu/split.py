"""Several devices as one: each holds a range of every layer's output features.

A batch goes to all of them at once: each takes the same rows of x, computes its own columns of y,
and leaves them in memory of its own; whoever asks for the results gets whole rows. No device waits
for another and nothing is added up between them. Results are never written over activations, which
another device may still read. Layers that are not quantized stay whole, on one device each: torch
would add up their sums in another order for another number of features.
"""

import hashlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from qlinear_service.dtypes import DType
from qlinear_service.errors import EngineLost
from qlinear_service.gpu.express import Trip
from qlinear_service.gpu.stages import Stage, copied
from qlinear_service.gpu.streams import Device, Times
from qlinear_service.kernels import layout
from qlinear_service.kernels.cuda import DeviceLost
from qlinear_service.layers import LayerSpec, QuantizedLinear

__all__ = ["Part", "SplitDevice", "SplitMarks", "SplitStage", "outline", "ranges"]


class Part(NamedTuple):
    """Some output features of a layer, on one device."""

    place: int
    """Of the device, in the order in which devices are named."""
    begin: int
    end: int
    layer: QuantizedLinear


def ranges(spec: LayerSpec, count: int) -> list[tuple[int, int]]:
    """Return the output features of each of `count` devices, begin to end; they may be none.

    Cuts are at multiples of 64, to which features are padded, and as even as those allow. A layer
    that is not quantized is whole on one device, which its name decides.
    """
    if not spec.quantized:
        digest = hashlib.blake2b(spec.name.encode(), digest_size=8).digest()
        chosen = int.from_bytes(digest, "big") % count
        return [(0, spec.n if place == chosen else 0) for place in range(count)]
    blocks = spec.n_padded // layout.PAD_N
    cuts = [min(blocks * i // count * layout.PAD_N, spec.n) for i in range(count + 1)]
    return list(itertools.pairwise(cuts))


def outline(layer: QuantizedLinear) -> QuantizedLinear:
    """Return `layer` without what its tensors hold: their shapes, and no memory."""

    def without(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else torch.empty_like(tensor, device="meta")

    return replace(
        layer,
        qweight=torch.empty_like(layer.qweight, device="meta"),
        scales=torch.empty_like(layer.scales, device="meta"),
        zeros=without(layer.zeros),
        bias=without(layer.bias),
        k_permutation=without(layer.k_permutation),
    )


class SplitMarks:
    """The devices that a batch is on, and what each of them marks its steps with."""

    __slots__ = ("running",)

    def __init__(self) -> None:
        self.running: list[tuple[int, object]] = []


class SplitStage(Stage):
    """A stage on each device. All copy activations from the same host memory."""

    __slots__ = ("stages",)

    def __init__(self, stages: Sequence[Stage]) -> None:
        first = stages[0]
        self.stages = stages
        self.x, self.y, self.table = first.x, first.y, first.table
        self.marks = SplitMarks()
        self.prepared = {}

    def fits(self, x_bytes: int, y_bytes: int) -> bool:
        """Say whether so much has room on every device."""
        return all(stage.fits(x_bytes, y_bytes) for stage in self.stages)

    def grow(self, x_bytes: int, y_bytes: int, *, x_host: torch.Tensor | None = None) -> None:
        """Make room on every device; after an error there may be less than before.

        Raises:
            RuntimeError: a device has no room.
        """
        if self.fits(x_bytes, y_bytes):
            return
        x_bytes = max(x_bytes, len(self.x.device))
        y_bytes = max(y_bytes, len(self.y.device))
        # All of them, so that none copies from memory that another has let go of.
        self.drop()
        for stage in self.stages:
            stage.grow(x_bytes, y_bytes, x_host=x_host)
            x_host = stage.x.host

    def drop(self) -> None:
        """Let go of the buffers on every device."""
        for stage in self.stages:
            stage.drop()


class SplitDevice:
    """Devices that compute every batch together; see streams.py for what a device does.

    Args:
        devices: by the names that metrics and logs give them.
    """

    scatters = chains = False

    def __init__(self, devices: Mapping[str, Device]) -> None:
        self._names = tuple(devices)
        self._devices = tuple(devices.values())
        self._parts: WeakKeyDictionary[QuantizedLinear, tuple[Part, ...]] = WeakKeyDictionary()

    def add(self, layer: QuantizedLinear, parts: Sequence[Part]) -> None:
        """Take over a layer.

        Args:
            layer: what batches will name; an `outline` will do.
            parts: all of its features, in order.
        """
        self._parts[layer] = tuple(parts)

    def parts_of(self, layer: QuantizedLinear) -> tuple[Part, ...]:
        """Return where a layer is."""
        return self._parts[layer]

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return host memory that all devices can copy from and to."""
        return self._devices[0].host_memory(nbytes)

    def new_stage(self) -> SplitStage:
        """Return a stage on each device."""
        return SplitStage([device.new_stage() for device in self._devices])

    def admit(self, address: int, nbytes: int) -> str:
        """Let kernels of all devices into host memory, or of none."""
        for place, device in enumerate(self._devices):
            why_not = device.admit(address, nbytes)
            if why_not:
                for earlier in self._devices[:place]:
                    earlier.dismiss(address)
                return why_not
        return ""

    def dismiss(self, address: int) -> None:
        """Shut kernels of all devices out."""
        for device in self._devices:
            device.dismiss(address)

    def can_gather(self, layer: QuantizedLinear) -> bool:
        """Say whether every device can gather rows for its part."""
        return all(self._devices[part.place].can_gather(part.layer) for part in self._parts[layer])

    def submit(self, trip: Trip) -> None:
        """Put a batch on its way on every device that holds a part of its layer."""
        stage = trip.stage
        assert isinstance(stage, SplitStage), "a stage of this device"
        running = stage.marks.running
        running.clear()
        for part in self._parts[trip.layer]:
            inner = stage.stages[part.place]
            running.append((part.place, inner.marks))
            self._devices[part.place].submit(
                Trip(
                    layer=part.layer, stage=inner, parts=trip.parts, rows=trip.rows,
                    x_dtype=trip.x_dtype, y_dtype=trip.y_dtype, way=trip.way, alone=trip.alone,
                )
            )  # fmt: skip

    def wait(self, marks: SplitMarks, seconds: float | None = None) -> bool:
        """Wait for all devices that the batch is on."""
        if seconds is None:
            return all([self._devices[place].wait(each) for place, each in marks.running])
        end = time.perf_counter() + seconds
        return all(
            self._devices[place].wait(each, max(0.0, end - time.perf_counter()))
            for place, each in marks.running
        )

    def times(self, marks: SplitMarks) -> Times:
        """Return the longest time of each step, and what each device's kernel took."""
        found = [(place, self._devices[place].times(each)) for place, each in marks.running]
        return Times(
            to_device=max(times.to_device for _, times in found),
            kernel=max(times.kernel for _, times in found),
            from_device=max(times.from_device for _, times in found),
            kernels=tuple((self._names[place], times.kernel) for place, times in found),
        )

    def results(self, stage: Stage, layer: QuantizedLinear, rows: int, dtype: DType) -> memoryview:
        """Return rows of y, put together from the columns that each device has left."""
        assert isinstance(stage, SplitStage), "a stage of this device"
        parts, size = self._parts[layer], dtype.itemsize
        if len(parts) == 1:
            return copied(stage.stages[parts[0].place].y.host[: rows * layer.spec.n * size])
        y = np.empty((rows, layer.spec.n), dtype=f"u{size}")
        for place, begin, end, _ in parts:
            left = stage.stages[place].y.host[: rows * (end - begin) * size].numpy()
            y[:, begin:end] = left.view(y.dtype).reshape(rows, end - begin)
        return y.data.cast("B")

    def settle(self) -> None:
        """Wait until nothing touches memory any more, on no device, lost or not."""
        errors: list[BaseException] = []
        for device in self._devices:
            try:
                device.settle()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def explained(self, error: BaseException) -> BaseException:
        """Return EngineLost for an error after which a device is gone; the text names it."""
        # Whose error it is, only the devices know.
        asked = RuntimeError(str(error)) if isinstance(error, DeviceLost) else error
        for device in self._devices:
            told = device.explained(asked)
            if isinstance(told, EngineLost):
                return told
        return self._devices[0].explained(error)
