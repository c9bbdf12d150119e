"""What a process tells the service manager that started it (sd_notify(3)): that it serves, and that it still runs.

Without one (no NOTIFY_SOCKET) nothing is sent. The units of deploy/systemd have Type=notify and WatchdogSec=.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import Final

log = logging.getLogger(__name__)

READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
_BEATS_PER_TIMEOUT: Final = 3
"""sd_watchdog_enabled(3) advises two: one that comes late is no failure then."""


def notify(*assignments: str) -> None:
    """Send `assignments`, such as `READY`, to the service manager; a failure is logged, since service goes on."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.setblocking(False)  # a manager that reads nothing must not hold up service
            sending.sendto("\n".join(assignments).encode(), f"\0{address[1:]}" if address[0] == "@" else address)
    except OSError as error:
        log.warning("the service manager was not told %s: %s", " ".join(assignments), error)


def watchdog_seconds() -> float | None:
    """Return the time without `ALIVE` after which the service manager kills this process, None for any."""
    text = os.environ.get("WATCHDOG_USEC", "")
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # inherited by a child of the process that is watched
    with contextlib.suppress(ValueError):
        return int(text) / 1e6 if int(text) > 0 else None
    return None


async def report_serving() -> None:
    """Say that this process serves, and then that its event loop still runs, as often as the watchdog wants.

    Run it as a task of that loop once there is something to serve; it ends at once where nothing is watched.
    """
    notify(READY)
    timeout_s = watchdog_seconds()
    while timeout_s is not None:
        notify(ALIVE)
        await asyncio.sleep(timeout_s / _BEATS_PER_TIMEOUT)
