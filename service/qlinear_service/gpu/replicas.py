"""Engines side by side, each with all layers: a batch goes to the one with the fewest.

Knows nothing of what an engine does with a batch.
"""

import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from qlinear_service.batching import Batch
from qlinear_service.gpu.engine import GpuEngine
from qlinear_service.results import BatchResult

__all__ = ["ReplicaRunner"]


T = TypeVar("T")


class ReplicaRunner:
    """Runs each batch on one of several engines; an engine that is lost ends all.

    Args:
        engines: by the names of their devices.
    """

    def __init__(self, engines: Mapping[str, GpuEngine]) -> None:
        self._engines = dict(engines)
        self._running = dict.fromkeys(engines, 0)
        self.most_in_flight = sum(engine.most_in_flight for engine in engines.values())
        # Beside these, an engine is never given more than it holds: each batch, of a chain or not,
        # goes where the fewest are.
        self.most_chained = min(engine.most_chained for engine in engines.values())

    async def run(self, batch: Batch) -> BatchResult:
        """Return the result rows of each part, and which device has computed them."""
        name = self._free_first()
        return _named(name, await self._on(name, self._engines[name].run(batch)))

    def goes_together(self, batches: Sequence[Batch]) -> bool:
        """Say whether any engine, whichever is free then, takes `batches` as one."""
        return all(engine.goes_together(batches) for engine in self._engines.values())

    async def run_together(self, batches: Sequence[Batch]) -> list[BatchResult]:
        """Do what `run` does for batches that `goes_together`, all on one engine."""
        name = self._free_first()
        results = await self._on(name, self._engines[name].run_together(batches))
        return [_named(name, result) for result in results]

    def is_lone(self, batch: Batch) -> bool:
        """Say whether the engine that would get `batch` takes it for a lone one."""
        return self._engines[self._free_first()].is_lone(batch)

    async def run_lone(self, batch: Batch) -> BatchResult:
        """Do what `run` does for a batch that `is_lone`."""
        name = self._free_first()
        return _named(name, await self._on(name, self._engines[name].run_lone(batch)))

    def stop(self, timeout_seconds: float) -> bool:
        """End all engines; return whether all have ended in time."""
        end = time.monotonic() + timeout_seconds
        engines = self._engines.values()
        return all([engine.stop(max(0.0, end - time.monotonic())) for engine in engines])

    def _free_first(self) -> str:
        return min(self._running, key=self._running.__getitem__)

    async def _on(self, name: str, work: Awaitable[T]) -> T:
        self._running[name] += 1
        try:
            return await work
        finally:
            self._running[name] -= 1


def _named(name: str, result: BatchResult) -> BatchResult:
    return replace(result, launches=((name, result.kernel_nanoseconds),))
