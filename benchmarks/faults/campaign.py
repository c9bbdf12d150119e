"""One fault after the other upon a swarm that works on, the time each took to get over, and what is seen at the end.

A fault is over when what caused it has ended: at once for a kill. From then on its recovery is timed, until the log
shows for every process that was harmed what that process is for, and a moment after the process was there again:

    coordinator, verifier    an admitted group
    trainer                  a new policy
    relay                    an admitted group under a policy that is newer than the fault
    worker                   an admitted group of its own

New faults come while up to MOST_OPEN earlier ones are not got over yet, and so add to their times.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.faults.checks import Evidence
from benchmarks.faults.kinds import FaultKind, Struck
from benchmarks.faults.stage import RELAYS, WORKERS, Stage
from benchmarks.faults.witness import read_checkpoint, read_leaves
from coordinator.lab.processes.local_http import get_json
from coordinator.lab.processes.supervisor import launched
from node.protocol.admission import Outcome
from node.protocol.messages import LogEntry, PolicyEntry, Receipt, VerdictEntry
from node.worker.state import MAX_RECORD_BYTES, KeptReceipt
from shardcast.wire import decode, digest

MOST_OPEN: Final = 2
LONGEST_PAUSE_S: Final = 2.0
START_S: Final = 180.0
RECOVERY_S: Final = 180.0
QUIET_S: Final = 3.0
SETTLE_S: Final = 90.0
AUDIT_S: Final = 900.0
ASK_S: Final = 5.0


@dataclass(slots=True)
class _Need:
    """Evidence of recovery that the log has to show of one harmed process, once that is up again.

    `read` is how far the log was looked at, from its size at that moment on; `head` the newest policy then.
    """

    name: str
    up_at: float | None = None
    head: int = -1
    read: int | None = None
    met_at: float | None = None


@dataclass(slots=True)
class Recovery:
    """A fault that is over, and how long it took to get over it, None while it is not or if it was given up."""

    kind: str
    what: str
    ended_at: float = field(default_factory=time.monotonic)
    ended_unix: float = field(default_factory=time.time)
    seconds: float | None = None
    given_up: bool = False
    needs: list[_Need] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return self.seconds is None and not self.given_up


class FaultCampaign:
    """Strikes a stage; `say` gets a line for each fault."""

    def __init__(self, stage: Stage, *, rng: Random, say: Callable[[str], None]) -> None:
        self.recoveries: list[Recovery] = []
        self._stage = stage
        self._rng = rng
        self._say = say
        stage.on_tick = self._look

    def start(self) -> None:
        """Wait until the run works; raises TimeoutError."""
        if not self._stage.until(self._has_begun, seconds=START_S):
            raise TimeoutError(f"no group was trained on within {START_S:.0f} s of the start:\n{self.logs()}")

    def run(self, kinds: list[FaultKind]) -> None:
        """Strike, once for each of these, and get over it."""
        for number, kind in enumerate(kinds, 1):
            self._stage.until(lambda: len(self._open()) < MOST_OPEN, seconds=RECOVERY_S)
            self._stage.wait(self._rng.uniform(0.0, LONGEST_PAUSE_S))
            struck = kind.strike(self._stage, self._rng)
            self._note(kind, struck)
            self._say(f"{number:3d}/{len(kinds)}  {struck.what}")
        self._stage.until(lambda: not self._open(), seconds=RECOVERY_S)

    def logs(self) -> str:
        """Return the ends of all logs."""
        supervisor = self._stage.supervisor
        return "\n".join(f"-- {name}\n{supervisor.log_tail(name, lines=8)}" for name in supervisor.pids)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Hold the workers while nothing waits for a verdict and nothing is logged. Raise TimeoutError."""
        with self._stage.stopped(WORKERS):
            if not self._stage.until(self._is_quiet, seconds=SETTLE_S):
                raise TimeoutError(f"the queue did not empty within {SETTLE_S:.0f} s:\n{self.logs()}")
            self._stage.witness.end()
            yield

    def evidence(self) -> Evidence:
        """Collect what an outsider sees of the run at rest."""
        swarm, witness, url = self._stage.swarm, self._stage.witness, self._stage.swarm.coordinator_url
        status = get_json(f"{url}/v1/status", seconds=ASK_S)
        checkpoint = read_checkpoint(url, run_id=swarm.run_id)
        if status is None or checkpoint is None:
            raise TimeoutError(f"the coordinator answers no more:\n{self.logs()}")
        leaves: list[bytes] = []
        while len(leaves) < checkpoint.size:
            leaves += read_leaves(url, len(leaves), checkpoint.size)
        return Evidence(
            leaves=leaves,
            witnessed=witness.leaves,
            checkpoints=[*witness.checkpoints, checkpoint],
            receipts=[receipt for name in WORKERS for receipt in kept_receipts(swarm.folder / name)],
            acknowledged=dict(self._stage.proxy.acknowledged),
            waiting=int(status["slots"]["admitted"]),
        )

    def audit(self) -> dict[str, Any]:
        """Run `swarmproof audit --all` on the run at rest. Raise TimeoutError."""
        swarm, logs = self._stage.swarm, self._stage.supervisor.log_folder
        output, errors = logs / "audit.json", logs / "audit.log"
        asked = ("audit", swarm.coordinator_url, "--run-id", swarm.run_id, "--all", "--source", swarm.origin_url)
        own = ("--state", str(swarm.folder / "auditor"), "--json")
        with launched(("-m", "node.cli", *asked, *own), output=output, errors=errors) as process:
            if not self._stage.until(lambda: process.poll() is not None, seconds=AUDIT_S):
                raise TimeoutError(f"the audit did not end within {AUDIT_S:.0f} s")
        said = output.read_text(encoding="utf-8").splitlines()
        found: dict[str, Any] = json.loads(said[-1])
        return found

    def _has_begun(self) -> bool:
        return any(isinstance(one.entry, PolicyEntry) and one.entry.version > 0 for one in self._stage.witness.seen)

    def _is_quiet(self) -> bool:
        """Whether nobody waits for a verdict, and nothing was logged for some time."""
        status = get_json(f"{self._stage.swarm.coordinator_url}/v1/status", seconds=ASK_S)
        if status is None or status["slots"]["submitted"]:
            return False
        seen = self._stage.witness.seen
        return status["log_size"] == len(seen) and time.monotonic() - seen[-1].at > QUIET_S

    def _note(self, kind: FaultKind, struck: Struck) -> None:
        recovery = Recovery(kind.name, struck.what, needs=[_Need(name) for name in struck.harmed])
        self.recoveries.append(recovery)

    def _open(self) -> list[Recovery]:
        return [one for one in self.recoveries if one.is_open]

    def _look(self) -> None:
        """Note which faults are got over, or given up."""
        for recovery in self._open():
            for need in recovery.needs:
                self._look_at(need, recovery)
            if all(need.met_at is not None for need in recovery.needs):
                recovery.seconds = max(need.met_at or 0.0 for need in recovery.needs) - recovery.ended_at
            elif time.monotonic() - recovery.ended_at > RECOVERY_S:
                recovery.given_up = True
                missed = ", ".join(need.name for need in recovery.needs if need.met_at is None)
                self._say(f"         not got over in {RECOVERY_S:.0f} s: {recovery.what} ({missed})")

    def _look_at(self, need: _Need, recovery: Recovery) -> None:
        if need.met_at is not None:
            return
        if need.up_at is None:
            if not self._stage.is_up(need.name, since=recovery.ended_unix):
                return
            need.up_at = time.monotonic() if need.name in WORKERS else recovery.ended_at
        seen = self._stage.witness.seen
        if need.read is None:
            need.read = self._stage.witness.size_after(need.up_at)
            if need.read is None:
                return
            policies = (one.entry.version for one in seen[: need.read] if isinstance(one.entry, PolicyEntry))
            need.head = max(policies, default=-1)
        while need.read < len(seen) and need.met_at is None:
            one = seen[need.read]
            need.read += 1
            if self._shows(need, one.entry):
                need.met_at = one.at

    def _shows(self, need: _Need, entry: LogEntry) -> bool:
        if need.name == "trainer":
            return isinstance(entry, PolicyEntry)
        if not isinstance(entry, VerdictEntry) or entry.outcome is not Outcome.ADMITTED:
            return False
        if need.name in RELAYS:
            return entry.version > need.head
        return need.name not in WORKERS or entry.node == self._stage.nodes[need.name]


def kept_receipts(state: Path) -> Iterator[Receipt]:
    """Yield the receipts that a worker keeps, without a last line that was cut short."""
    path = state / "receipts.ndjson"
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield decode(KeptReceipt, line, max_bytes=MAX_RECORD_BYTES).receipt


def damage(data: Path, database: Path) -> list[str]:
    """List what is broken in the data folder of a stopped run: misnamed blobs, and the database."""
    broken = [
        f"blob {path.name} is not what its name says"
        for path in (data / "blobs").glob("??/*")
        if digest(path.read_bytes()) != path.name
    ]
    with closing(sqlite3.connect(database)) as connection:
        said = [row[0] for row in connection.execute("PRAGMA integrity_check")]
    return broken if said == ["ok"] else [*broken, *(f"database: {one}" for one in said)]
