"""SIGTERM and SIGINT of a serving process: the first asks it to end, the second ends it at once."""

import asyncio
import logging
import os
import signal

from qlinear_service.log_values import event

__all__ = ["stop_on_signals"]

logger = logging.getLogger(__name__)


def stop_on_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second one exits at once."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        event(logger, logging.INFO, "signal", name=signal.Signals(number).name)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop
