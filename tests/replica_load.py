"""Callers that never stop, behind one target: every answer is compared, every failure is kept.

Each has a client of its own, hence a connection and a stream: blocking ones, and asyncio's.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from chaos.truth import POOL_ROWS, Truth, numbers_from

from qlinear_client import AsyncClient, Client
from qlinear_service.dtypes import DType

LAYERS = ("one/up", "one/eight", "two/wide")
PAUSE_SECONDS = 0.02
"""Between the calls of one caller: the servers share two cores with everything else here."""

CALL_SECONDS = 30.0
"""A call's deadline: a slow machine is no lost call."""

Array = np.ndarray[Any, Any]


class Load:
    """What became of all calls."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._stop = threading.Event()
        self.answered = 0
        self.problems: list[str] = []
        """Of calls that failed, and of answers that are wrong."""

    @property
    def goes_on(self) -> bool:
        """Whether callers shall call again."""
        return not self._stop.is_set()

    def stop(self) -> None:
        """Let each caller finish its call and leave."""
        self._stop.set()

    def draw(self, chance: random.Random) -> tuple[str, Array, Array]:
        """Return a layer, the numbers of some rows and their activations."""
        layer, numbers = chance.choice(LAYERS), numbers_from(chance.randrange(POOL_ROWS), 3)
        return layer, numbers, self._truth.rows(layer, DType.F16, numbers)

    def take(self, layer: str, numbers: Array, y: Array | Exception) -> None:
        """Note what a call came to."""
        if isinstance(y, Exception):
            self.problems.append(repr(y))
            return
        problem = self._truth.problem(layer, DType.F16, y, numbers, same_bits=False)
        self.answered += 1
        if problem:
            self.problems.append(problem)

    def blocking(self, matmul: Callable[[str, Array], Array], seed: int) -> None:
        """Call until the end."""
        chance = random.Random(seed)
        while self.goes_on:
            layer, numbers, x = self.draw(chance)
            try:
                self.take(layer, numbers, matmul(layer, x))
            except Exception as error:  # whatever it is, a call was lost
                self.take(layer, numbers, error)
            self._stop.wait(PAUSE_SECONDS)

    async def waiting(self, client: AsyncClient, seed: int) -> None:
        """Call until the end."""
        chance = random.Random(seed)
        while self.goes_on:
            layer, numbers, x = self.draw(chance)
            try:
                self.take(layer, numbers, await client.matmul(layer, x))
            except Exception as error:  # whatever it is, a call was lost
                self.take(layer, numbers, error)
            await asyncio.sleep(PAUSE_SECONDS)


@contextmanager
def under_load(truth: Truth, target: str, transport: str) -> Iterator[Load]:
    """Call from eight clients until the end of the block."""
    load = Load(truth)
    for layer in LAYERS:  # so that the bounds are computed once, and not by each thread
        nothing = np.zeros((0, truth.layers[layer].spec.n), np.float16)
        assert not truth.problem(layer, DType.F16, nothing, numbers_from(0, 0), same_bits=False)

    def blocking(seed: int) -> None:
        with Client(target, timeout=CALL_SECONDS, transport=transport) as client:
            load.blocking(client.matmul, seed)

    async def waiting(seed: int) -> None:
        async with AsyncClient(target, timeout=CALL_SECONDS, transport=transport) as client:
            await load.waiting(client, seed)

    async def several() -> None:
        await asyncio.gather(*(waiting(seed) for seed in range(4)))

    callers = [threading.Thread(target=blocking, args=(seed,)) for seed in range(4, 8)]
    callers.append(threading.Thread(target=lambda: asyncio.run(several())))
    with calling(load, callers):
        yield load


@contextmanager
def calling(load: Load, callers: list[threading.Thread]) -> Iterator[None]:
    """Run the callers until the end of the block."""
    for caller in callers:
        caller.start()
    try:
        yield
    finally:
        load.stop()
        for caller in callers:
            caller.join()
