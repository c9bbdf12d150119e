"""A process of the operator's says every few seconds that it is there (`coordinator.run.health` reads it)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from coordinator.run.background import background_thread
from coordinator.run.home import Home
from coordinator.storage.faults import DatabaseFault, advice
from coordinator.storage.heartbeats import Role, beat
from coordinator.storage.verdicts import clock

log = logging.getLogger(__name__)

BEAT_SECONDS: Final = 5.0


class Condition:
    """What keeps a process from its work: a code of `coordinator.storage.faults.trouble_of`, "" for nothing."""

    def __init__(self) -> None:
        self.trouble = ""


@contextmanager
def heartbeat(home: Home, role: Role, name: str, condition: Condition) -> Iterator[None]:
    """Context manager during which a thread notes the process `name` as there, and its condition."""

    def keep_beating(stop: threading.Event) -> None:
        while True:
            try:
                with home.database.write(durable=False) as connection:
                    beat(connection, role, name, now=clock(), trouble=condition.trouble)
            except (DatabaseFault, OSError) as error:
                log.debug("no heartbeat was written: %s", advice(error))
            if stop.wait(BEAT_SECONDS):
                return

    with background_thread(keep_beating, name="heartbeat"):
        yield
