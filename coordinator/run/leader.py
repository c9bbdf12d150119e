"""The leader: what is to be done now and then for a whole run, by one process at a time (`storage.leadership`).

Any number of processes may offer to lead; the others stand by, and one of them takes over within seconds once the
leader is gone. Nothing that nodes or training rest on waits for it: a run without a leader goes on, untidily.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coordinator.errors import StorageFault
from coordinator.run.home import Home
from coordinator.storage import locks, uploads, work
from coordinator.storage.database import Connection
from coordinator.storage.facts import LEADER, put_fact, read_fact
from coordinator.storage.faults import DatabaseFault
from coordinator.storage.verdicts import clock

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Duty:
    """Something to be done every so many seconds; `do` takes the time, and may fail as storage does."""

    name: str
    every_seconds: float
    do: Callable[[float], None]


@dataclass(frozen=True, slots=True)
class LeaderSeen:
    """Who led last, and when it said so."""

    name: str
    seen_at: float


class Leader:
    """Offers to lead a run, and does what a leader does while it is one."""

    def __init__(self, home: Home, *, name: str | None = None, duties: tuple[Duty, ...] = ()) -> None:
        self._home = home
        self._name = name or socket.gethostname()
        self._duties = (
            Duty("say who leads", 5.0, self._say),
            Duty("end leases that are over", 1.0, self._expire),
            Duty("remove uploads that came to nothing", 60.0, self._sweep),
            *duties,
        )
        self._done_at: dict[str, float] = {}
        self._leading = False

    @property
    def leading(self) -> bool:
        """Whether this process led when it last looked."""
        return self._leading

    def run(self, stop: threading.Event) -> None:
        """Lead, or stand by, until `stop` is set."""
        leadership = self._home.database.leadership()
        away = False
        try:
            while not stop.is_set():
                try:
                    self._note(leadership.take())
                    away = False
                except (DatabaseFault, OSError) as error:
                    if not away:
                        log.warning("cannot ask who leads, trying again: %s", error)
                    away, self._leading = True, False
                if self._leading:
                    self.work(clock())
                stop.wait(LOOK_SECONDS)
        finally:
            self._leading = False
            leadership.release()

    def _note(self, leading: bool) -> None:
        if leading and not self._leading:
            log.info("leading run %s as %s", self._home.run_id[:16], self._name)
        self._leading = leading

    def work(self, now: float) -> None:
        """Do what is due; what fails is tried again when it is due again."""
        for duty in self._duties:
            if 0 <= now - self._done_at.get(duty.name, -duty.every_seconds) < duty.every_seconds:
                continue
            self._done_at[duty.name] = now
            try:
                duty.do(now)
            except (DatabaseFault, OSError, StorageFault) as error:
                log.warning("could not %s, trying again: %s", duty.name, error)

    def _say(self, now: float) -> None:
        value = json.dumps({"name": self._name, "at": now})
        with self._home.database.write(durable=False) as connection:
            locks.leasing(connection)
            put_fact(connection, LEADER, value)

    def _expire(self, now: float) -> None:
        with self._home.database.write(durable=False) as connection:
            locks.leasing(connection)
            work.expire_leases(connection, spec=self._home.spec, now=now)

    def _sweep(self, now: float) -> None:
        if (store := self._home.blobs.uploads) is not None:
            uploads.sweep(self._home.database, store, now=now)


def last_leader(connection: Connection) -> LeaderSeen | None:
    """Who led last, None if nobody ever did."""
    found = read_fact(connection, LEADER)
    if found is None:
        return None
    said = json.loads(found)
    return LeaderSeen(name=str(said["name"]), seen_at=float(said["at"]))


@contextmanager
def leading(leader: Leader) -> Iterator[Leader]:
    """A thread that leads while the block runs."""
    stop = threading.Event()
    thread = threading.Thread(target=leader.run, args=(stop,), name="leader")
    thread.start()
    try:
        yield leader
    finally:
        stop.set()
        thread.join()
