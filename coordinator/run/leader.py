"""The leader runs a run's periodic maintenance, in one process at a time (`storage.leadership`).

Other candidates stand by and take over within seconds. Nodes and training do not depend on it: without a leader,
expired leases and abandoned uploads remain, and new relays are not told about.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.errors import StorageFault
from coordinator.run.background import background_thread
from coordinator.run.health import read_health
from coordinator.run.heartbeat import BEAT_SECONDS
from coordinator.run.home import Home
from coordinator.run.relay_probes import RelayProbes
from coordinator.storage import locks, retention, uploads, work
from coordinator.storage.database import Connection
from coordinator.storage.faults import DatabaseFault, advice
from coordinator.storage.heartbeats import Heartbeat, Role, beat, read_heartbeats
from coordinator.storage.tallies import DAY
from coordinator.storage.verdicts import clock

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
EXPIRY_SECONDS = 5.0
"""Between sweeps of old evidence, each of which takes a second at most."""
START_SECONDS = 60.0
"""Everything else of the operator's is started within it."""


class Leader:
    """A candidate for leadership that runs the periodic tasks while it leads.

    Files of submissions are removed `keep_evidence_days` after their verdict, None: never.
    """

    def __init__(self, home: Home, *, name: str | None = None, keep_evidence_days: int | None = None) -> None:
        self._home = home
        self._keep_evidence_days = keep_evidence_days
        self._name = name or socket.gethostname()
        self._tasks: dict[str, tuple[float, Callable[[float], None]]] = {  # what for, period in seconds, function
            "write the heartbeat": (BEAT_SECONDS, self._heartbeat),
            "expire leases": (1.0, self._expire),
            "remove abandoned uploads": (60.0, self._sweep),
            "look how the run is": (10.0, self._look),
        }
        if keep_evidence_days is not None:
            self._tasks["remove old evidence"] = (EXPIRY_SECONDS, self._remove_expired)
        self._run_at: dict[str, float] = {}
        self._began = clock()
        self._said: tuple[str, ...] = ()
        self._leading = False

    @property
    def leading(self) -> bool:
        """Whether this process led at the last poll."""
        return self._leading

    def run(self, stop: threading.Event, *, polled: Callable[[], None] = lambda: None) -> None:
        """Lead or stand by until `stop` is set; `polled` is called each second."""
        leadership = self._home.database.leadership()
        unavailable = False
        probes = RelayProbes(self._home, leads=lambda: self._leading)
        with background_thread(probes.run, name="relay probes"):
            try:
                while not stop.is_set():
                    try:
                        leading = leadership.acquire()
                        if leading and not self._leading:
                            log.info("leading run %s as %s", self._home.run_id[:16], self._name)
                        unavailable, self._leading = False, leading
                    except (DatabaseFault, OSError) as error:
                        if not unavailable:
                            log.warning(
                                "leadership unknown, database unavailable; retrying every second: %s", advice(error)
                            )
                        unavailable, self._leading = True, False
                    if self._leading:
                        self.work(clock())
                    polled()
                    stop.wait(POLL_SECONDS)
            finally:
                self._leading = False
                leadership.release()

    def work(self, now: float) -> None:
        """Run the tasks that are due; one that fails is retried after its period."""
        for name, (period_s, task) in self._tasks.items():
            if 0 <= now - self._run_at.get(name, -period_s) < period_s:
                continue
            self._run_at[name] = now
            try:
                task(now)
            except (DatabaseFault, OSError, StorageFault) as error:
                log.warning("could not %s, retrying in %.0f s: %s", name, period_s, advice(error))

    def _heartbeat(self, now: float) -> None:
        with self._home.database.write(durable=False) as connection:
            beat(connection, Role.LEADER, self._name, now=now)

    def _expire(self, now: float) -> None:
        with self._home.database.write(durable=False) as connection:
            locks.leasing(connection)
            work.expire_leases(connection, spec=self._home.spec, now=now)

    def _sweep(self, now: float) -> None:
        if (store := self._home.blobs.uploads) is not None:
            uploads.sweep(self._home.database, store, now=now)

    def _remove_expired(self, now: float) -> None:
        before = now - DAY * (self._keep_evidence_days or 0)
        retention.remove_expired(self._home.database, self._home.blobs, spec=self._home.spec, before=before)

    def _look(self, now: float) -> None:
        """Log what is wrong with the run when that changes; not while its processes are being started."""
        if 0 <= now - self._began < START_SECONDS:
            return
        health = read_health(self._home, has_sources=True, now=now)
        said = tuple(problem.rule.code for problem in health.problems)
        if said == self._said:
            return
        for problem in health.problems:
            log.warning("%s %s", problem.text, problem.rule.todo)
        if not health.problems:
            log.info("%s", health.headline)
        self._said = said


def last_leader(connection: Connection) -> Heartbeat | None:
    """Return the last sign of life of who led last, None before the first."""
    return next((one for one in read_heartbeats(connection) if one.role is Role.LEADER), None)


@contextmanager
def leader_thread(leader: Leader) -> Iterator[Leader]:
    """Run `leader` in a thread while the block runs."""
    with background_thread(leader.run, name="leader"):
        yield leader
