"""Ending a daemon: the first signal asks, the second insists."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

log = logging.getLogger(__name__)

EXIT_AT_ONCE = 130


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets; another one ends the process on the spot. Call it in the loop."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(EXIT_AT_ONCE)
        log.info("%s: finishing; once more ends it at once", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop


class Stopped(Exception):
    """Work was given up because the daemon is to end."""
