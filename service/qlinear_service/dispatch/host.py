"""What the batcher of a GPU server asks of the engine that computes what the dispatcher leaves."""

from typing import Protocol

from qlinear_service.results import BatchResult
from qlinear_service.work import Batch

__all__ = ["HostEngine"]


class HostEngine(Protocol):
    """What computes the batches that the dispatcher leaves to Python."""

    async def run(self, batch: Batch) -> BatchResult:
        """Return the result rows of each part; see engine.BatchRunner."""
        ...

    async def recover(self, error: BaseException) -> None:
        """Make the device fit for more after a batch of the dispatcher has failed.

        Raises:
            EngineLost: that cannot be.
        """
        ...

    def learn(self, batch: Batch) -> None:
        """Teach the dispatcher how to send batches like this one, if it can."""
        ...

    def kernel_nanoseconds(self, measured: int) -> int:
        """Return what a product took, of what was measured around it."""
        ...
