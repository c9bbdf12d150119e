"""A process ends once a newer release has migrated its database: it would leave out what it does not know."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from coordinator.errors import OtherRelease
from coordinator.run.background import background_thread
from coordinator.run.home import Home, check_release
from coordinator.storage.faults import DatabaseFault
from coordinator.storage.schema_check import unknown_revision

log = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 10.0


@contextmanager
def release_watch(home: Home, *, period_seconds: float = PERIOD_SECONDS) -> Iterator[None]:
    """Context manager during which a thread watches for migrations by a newer release.

    After one it sends this process SIGTERM, for which the block must end, and the manager raises OtherRelease then.
    """
    found = list[OtherRelease]()

    def watch(stop: threading.Event) -> None:
        while not found and not stop.wait(period_seconds):
            try:
                check_release(home.database, home.folder, unknown_revision)
            except OtherRelease as error:
                log.error("%s; this process ends", error)  # noqa: TRY400  (the traceback says nothing)
                found.append(error)
                os.kill(os.getpid(), signal.SIGTERM)
            except (DatabaseFault, OSError):
                continue  # whoever works with the database says so

    with background_thread(watch, name="release watch"):
        yield
    if found:
        raise found[0]
