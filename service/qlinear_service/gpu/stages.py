"""Stages: the buffers of one batch in flight, on the host and on the device.

They grow to the size class of what passes through them and stay that large: at most so many times
the activations and results of the largest batch. Knows nothing of batches; any thread may take one.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from qlinear_service.config import size_class
from qlinear_service.gpu.ways import TABLE_ROWS

__all__ = ["LARGE_COPY_BYTES", "Memory", "Stage", "StagePool", "copied", "places_of"]

TABLE_BYTES = 2 * 8 * TABLE_ROWS
"""An address for each row of x and of y."""

FIRST_BYTES = 1 << 20
"""Taken at the start, so that a full device is noticed then and most calls find what they need."""


RESULTS_ALIGN_BYTES = 256
"""Where the results of a further layer may begin, so that kernels can store as for the first."""

LARGE_COPY_BYTES = 64 * 1024
"""From here on copies are torch's, which lets go of the interpreter lock and costs some
microseconds more than one of Python's own."""


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

    def grow(self, memory: Memory, nbytes: int, host: torch.Tensor | None = None) -> None:
        if len(self.device) >= nbytes:
            return
        # Let go of the old ones first: together they could exceed what there is.
        self.drop()
        if host is None:
            host = memory.host_memory(size_class(nbytes))
        self.device = memory.device_memory(size_class(nbytes))
        self.host = host

    def drop(self) -> None:
        self.host = self.device = torch.empty(0, dtype=torch.uint8)


class Stage:
    """The buffers and events of one batch in flight.

    Args:
        memory: where its buffers come from.
    """

    __slots__ = ("_memory", "marks", "prepared", "table", "x", "y")

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
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

    def grow(self, x_bytes: int, y_bytes: int, *, x_host: torch.Tensor | None = None) -> None:
        """Make room; after an error there may be less than before, never a wrong size.

        Args:
            x_bytes: of activations, on either side.
            y_bytes: of results.
            x_host: takes the place of host memory for activations, where they grow.

        Raises:
            RuntimeError: the device has no room.
        """
        if not self.fits(x_bytes, y_bytes):
            self.prepared.clear()
        self.x.grow(self._memory, x_bytes, x_host)
        self.y.grow(self._memory, y_bytes)

    def drop(self) -> None:
        """Let go of all buffers."""
        self.prepared.clear()
        self.x.drop()
        self.y.drop()


class StagePool:
    """The stages of a device.

    Args:
        new_stage: makes one, without room.
        count: batches that may be in flight.

    Raises:
        RuntimeError: the device has no room for the first buffers.
    """

    def __init__(self, new_stage: Callable[[], Stage], count: int) -> None:
        self._free: deque[Stage] = deque()
        for _ in range(count):
            stage = new_stage()
            stage.grow(FIRST_BYTES, FIRST_BYTES)
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
            stage.grow(x_bytes, y_bytes)
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

    def drop(self, count: int) -> None:
        """Let go of so many stages that nobody uses.

        Raises:
            IndexError: there are not so many.
        """
        for _ in range(count):
            self._free.pop().drop()

    def give_back(self, stage: Stage) -> None:
        """Let the next batch have `stage`; nothing touches its buffers any more."""
        self._free.append(stage)


def places_of(sizes: Sequence[int]) -> list[int]:
    """Return where the results of each of several layers begin in a stage, in bytes.

    Args:
        sizes: bytes of the results of each.
    """
    begins, end = [], 0
    for nbytes in sizes:
        begin = -(-end // RESULTS_ALIGN_BYTES) * RESULTS_ALIGN_BYTES
        begins.append(begin)
        end = begin + nbytes
    return begins


def copied(rows: torch.Tensor) -> memoryview:
    """Return a copy of host memory, so that slow readers hold up no stage."""
    if len(rows) < LARGE_COPY_BYTES:
        return memoryview(rows.numpy().tobytes())
    copy = torch.empty(len(rows), dtype=torch.uint8).copy_(rows)
    return copy.numpy().data.cast("B")
