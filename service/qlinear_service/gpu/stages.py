"""Stages: the buffers of one batch in flight, on the host and on the device.

They grow to the size class of what passes through them and stay that large: at most so many times
the activations and results of the largest batch. Knows nothing of batches; any thread may take one.
"""

from collections import deque
from typing import Any, Protocol

import torch

from qlinear_service.config import size_class
from qlinear_service.gpu.ways import TABLE_ROWS

__all__ = ["Memory", "Stage", "StagePool"]

TABLE_BYTES = 2 * 8 * TABLE_ROWS
"""An address for each row of x and of y."""

FIRST_BYTES = 1 << 20
"""Taken at the start, so that a full device is noticed then and most calls find what they need."""


class Memory(Protocol):
    """Where buffers come from."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes]."""

    def device_memory(self, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes]; raises RuntimeError if there is no room."""

    def new_marks(self) -> Any:
        """Return what tells when the steps of one batch have ended."""


class _Pair:
    """Buffers of the same size on both sides."""

    __slots__ = ("device", "host")

    def __init__(self) -> None:
        self.host = self.device = torch.empty(0, dtype=torch.uint8)

    def grow(self, memory: Memory, nbytes: int) -> None:
        if len(self.device) >= nbytes:
            return
        # Let go of the old ones first: together they could exceed what there is.
        self.host = self.device = torch.empty(0, dtype=torch.uint8)
        host = memory.host_memory(size_class(nbytes))
        self.device = memory.device_memory(size_class(nbytes))
        self.host = host


class Stage:
    """The buffers and events of one batch in flight."""

    __slots__ = ("marks", "prepared", "table", "x", "y")

    def __init__(self, memory: Memory) -> None:
        self.x = _Pair()
        """Activations."""
        self.y = _Pair()
        """Results."""
        self.table = memory.host_memory(TABLE_BYTES)
        self.marks = memory.new_marks()
        self.prepared: dict[Any, Any] = {}
        """What the device has worked out for these buffers; forgotten when they move."""

    def fits(self, x_bytes: int, y_bytes: int) -> bool:
        """Say whether so much has room without growing."""
        return len(self.x.device) >= x_bytes and len(self.y.device) >= y_bytes

    def grow(self, memory: Memory, x_bytes: int, y_bytes: int) -> None:
        """Make room; after an error there may be less than before, never a wrong size.

        Raises:
            RuntimeError: the device has no room.
        """
        if not self.fits(x_bytes, y_bytes):
            self.prepared.clear()
        self.x.grow(memory, x_bytes)
        self.y.grow(memory, y_bytes)


class StagePool:
    """The stages of a device.

    Args:
        memory: where their buffers come from.
        count: batches that may be in flight.

    Raises:
        RuntimeError: the device has no room for the first buffers.
    """

    def __init__(self, memory: Memory, count: int) -> None:
        self._memory = memory
        self._free: deque[Stage] = deque()
        for _ in range(count):
            stage = Stage(memory)
            stage.grow(memory, FIRST_BYTES, FIRST_BYTES)
            self._free.append(stage)

    @property
    def free(self) -> int:
        """Stages that nobody uses."""
        return len(self._free)

    def take(self, x_bytes: int, y_bytes: int) -> Stage:
        """Return a stage with so much room; blocks while it grows.

        Raises:
            RuntimeError: the device has no room, or more batches are in flight than there are
                stages.
        """
        try:
            stage = self._free.popleft()
        except IndexError:
            raise RuntimeError("more batches are in flight than there are stages") from None
        try:
            stage.grow(self._memory, x_bytes, y_bytes)
        except BaseException:
            self._free.append(stage)
            raise
        return stage

    def take_ready(self, x_bytes: int, y_bytes: int) -> Stage | None:
        """Return a stage that has room already, None if there is none; never blocks."""
        for _ in range(len(self._free)):
            try:
                stage = self._free.popleft()
            except IndexError:
                return None
            if stage.fits(x_bytes, y_bytes):
                return stage
            self._free.append(stage)
        return None

    def give_back(self, stage: Stage) -> None:
        """Let the next batch have `stage`; nothing touches its buffers any more."""
        self._free.append(stage)
