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
from coordinator.storage.heartbeats import Role, beat, last_beat
from coordinator.storage.verdicts import clock

log = logging.getLogger(__name__)

BEAT_SECONDS: Final = 5.0


class Condition:
    """What keeps a process from its work: a code of `coordinator.storage.faults.trouble_of`, or a verifier's NO_SOURCE;
    "" for nothing.
    """

    def __init__(self) -> None:
        self.trouble = ""


@contextmanager
def heartbeat(home: Home, role: Role, name: str, condition: Condition) -> Iterator[None]:
    """Context manager during which a thread notes the process `name` as there, and its condition.

    It logs an error when another running process of the role has the same name.
    """

    def keep_beating(stop: threading.Event) -> None:
        last: float | None = None
        has_warned = False
        while True:
            try:
                now = clock()
                own, last = last, now  # before: a write may be done though its reply is lost
                with home.database.write(durable=False) as connection:
                    before = last_beat(connection, role, name)
                    beat(connection, role, name, now=now, trouble=condition.trouble)
                is_shared = own is not None and before is not None and before > own
                if is_shared and not has_warned:
                    has_warned = True
                    log.error(
                        "another %s of this run runs under the name %s: each takes over what the other has begun. End "
                        "one of them; verifiers may have a --name each",
                        role.value,
                        name,
                    )
            except (DatabaseFault, OSError) as error:
                log.debug("no heartbeat was written: %s", advice(error))
            if stop.wait(BEAT_SECONDS):
                return

    with background_thread(keep_beating, name="heartbeat"):
        yield
