"""Batchers for the tests of this folder; whatever a test did, nothing may be left held."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from batcher_harness import Harness


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def build(**more: Any) -> Harness:
        made.append(Harness(**more))
        return made[-1]

    yield build
    for harness in made:
        harness.task.cancel()
        if harness.held_at_the_end is None:
            with pytest.raises(asyncio.CancelledError):
                await harness.task
        held = harness.held_at_the_end or 0
        assert harness.batcher.items_held == held, "an item was never released"
        assert len(harness.released) == len(set(harness.released)), "an item was released twice"
        assert len(harness.told) == len(set(harness.told)), "a call was answered twice"
        assert not harness.told_though_gone, "a caller that had left was told something"
