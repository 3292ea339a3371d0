"""The two ways to send: closed loop (N callers that wait) and open loop (calls fall due).

A closed loop slows down with the server and so never shows what users who do not wait would see.
In the open loop a call's latency counts from the instant it was due, whether the server, the
network or this program made it wait: nothing is left out (no coordinated omission).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeAlias

from qlinear_service.loadgen.tally import Answer, Tally
from qlinear_service.loadgen.traffic import Request

__all__ = ["LATE_SECONDS", "Send", "drive_closed", "drive_open"]

Send: TypeAlias = Callable[[Request], Awaitable[Answer]]
"""Sends one call and waits for its end, good or bad; raises only for mistakes of this program."""

LATE_SECONDS = 0.002
"""Timers of the event loop are about 1 ms coarse; what goes out later than this is called late."""


async def drive_closed(
    requests: Iterator[Request],
    send: Send,
    tally: Tally,
    *,
    concurrency: int,
    clock: Callable[[], float],
) -> None:
    """Keep `concurrency` calls in flight until the window closes and all are answered."""

    async def caller() -> None:
        while (begun := clock()) < tally.window.closes:
            request = next(requests)
            tally.note_sent(request, begun)
            answer = await send(request)
            tally.note_end(request, begun, clock(), answer)
            if answer.pause_seconds:
                await asyncio.sleep(answer.pause_seconds)

    async with asyncio.TaskGroup() as callers:
        for _ in range(concurrency):
            callers.create_task(caller())


async def drive_open(
    requests: Iterator[Request],
    send: Send,
    tally: Tally,
    *,
    due_times: Iterable[float],
    max_in_flight: int,
    clock: Callable[[], float],
) -> None:
    """Send each call when it is due, until the window closes and all are answered.

    Args:
        requests: what is sent, one for each due time, sent or not.
        send: sends one.
        tally: is told of each.
        due_times: instants on the clock, ascending.
        max_in_flight: a call that falls due while so many wait is counted as not sent.
        clock: the event loop's.
    """

    async def call(request: Request, due: float) -> None:
        tally.note_sent(request, due, late=clock() - due > LATE_SECONDS)
        answer = await send(request)
        tally.note_end(request, due, clock(), answer)

    async with asyncio.TaskGroup() as calls:
        waiting: set[asyncio.Task[None]] = set()
        for due in due_times:
            if due >= tally.window.closes:
                return
            # Also with nothing to wait for: the calls made before must get their turn.
            await asyncio.sleep(max(due - clock(), 0))
            request = next(requests)
            if len(waiting) >= max_in_flight:
                tally.note_not_sent(request, due)
                continue
            task = calls.create_task(call(request, due))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
