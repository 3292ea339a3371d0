"""Calls handed to a batcher, and what it tells of them as a future."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from qlinear_service.results import Answer, Outcome
from qlinear_service.work import WorkItem

Told: TypeAlias = asyncio.Future[list[Outcome]]


def told_by(
    submit: Callable[[Sequence[WorkItem], Callable[[Answer], None]], object],
    items: Sequence[WorkItem],
) -> Told:
    """Hand in the items of one call; a caller that has gone meanwhile is told nothing."""
    told: Told = asyncio.get_running_loop().create_future()

    def settle(answer: Answer) -> None:
        if told.cancelled():
            return
        if isinstance(answer, list):
            told.set_result(answer)
        else:
            told.set_exception(answer)

    submit(items, settle)
    return told
