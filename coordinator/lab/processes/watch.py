"""Watches a swarm through what everybody can see of it: status pages, the public log, the warm start's progress."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from coordinator.lab.processes.layout import Swarm, WorkerPlace
from coordinator.lab.processes.ledger import Ledger
from coordinator.lab.processes.local_http import get_json

INTERVAL_SECONDS = 0.4
_TIMEOUT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class RelayNow:
    """The newest version that a relay has heard of, and how much of it it holds."""

    name: str
    answering: bool = False
    version: int | None = None
    chunks_held: int = 0
    chunks_total: int = 0


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """A worker by the public log: `version` is the policy of its newest verdict."""

    place: WorkerPlace
    version: int | None = None
    tokens: int = 0
    tokens_per_second: float = 0.0
    admitted: int = 0
    rejected: int = 0
    main_reason: str | None = None


@dataclass(frozen=True, slots=True)
class SwarmSnapshot:
    """The swarm at one moment. `status` is the coordinator's last answer, empty before the first."""

    answering: bool = False
    status: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    relays: tuple[RelayNow, ...] = ()
    workers: tuple[WorkerNow, ...] = ()

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step that has its batch, in order."""
        return [step["reward_mean"] for step in self.status.get("steps", [])]

    @property
    def finished_steps(self) -> int:
        """Steps whose policy is published."""
        return int(self.status.get("finished_steps", 0))

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return bool(self.status.get("finished", False))

    @property
    def head_version(self) -> int:
        """The newest policy, -1 before the first."""
        return int(self.status.get("head_version", -1))


class SwarmWatcher(threading.Thread):
    """Refreshes `snapshot` in the background, so that a process that hangs does not freeze the view."""

    def __init__(self, swarm: Swarm) -> None:
        super().__init__(name="watcher", daemon=True)
        self.swarm = swarm
        self.ledger = Ledger(swarm.coordinator_url)
        self.arrivals: dict[int, dict[str, float]] = {}
        """When each relay was first seen to hold all of a version, in Unix seconds."""
        self.fetched: dict[str, tuple[int, int]] = {}
        """Bytes that each relay fetched, and what the versions that it had of them weigh."""
        self.warm_start_at: float | None = None
        """When the trainer's progress was first seen, in Unix seconds."""
        self.snapshot = SwarmSnapshot(
            relays=tuple(RelayNow(name) for name in swarm.relays),
            workers=tuple(WorkerNow(place) for place in swarm.workers),
        )
        self._ending = threading.Event()

    def run(self) -> None:
        while not self._ending.wait(INTERVAL_SECONDS):
            self.snapshot = self.look()

    def end(self) -> None:
        """Stop polling; returns once no request is under way."""
        self._ending.set()
        if self.is_alive():
            self.join()

    def look(self) -> SwarmSnapshot:
        """Poll every process once; one that does not answer keeps its last known values."""
        before = self.snapshot
        status = get_json(f"{self.swarm.coordinator_url}/v1/status", seconds=_TIMEOUT_SECONDS)
        if status is not None:
            self._read_log(int(status["log_size"]))
        progress = _read_progress(self.swarm.trainer_state / "progress.json")
        if progress is not None and self.warm_start_at is None:
            self.warm_start_at = time.time()
        return SwarmSnapshot(
            answering=status is not None,
            status=before.status if status is None else status,
            progress=progress or before.progress,
            relays=self._relays(),
            workers=tuple(self._worker(place) for place in self.swarm.workers),
        )

    def _read_log(self, size: int) -> None:
        try:
            self.ledger.catch_up(size)
        except (OSError, HTTPException):
            return  # the next look goes on where this one stopped

    def _relays(self) -> tuple[RelayNow, ...]:
        """Poll the relays, leaves first, so that none seems to be ahead of the root."""
        asked = [self._relay(name, url) for name, url in reversed(self.swarm.relays.items())]
        return tuple(reversed(asked))

    def _relay(self, name: str, url: str) -> RelayNow:
        found = get_json(f"{url}/v1/status", seconds=_TIMEOUT_SECONDS)
        if found is None or not found["versions"]:
            return RelayNow(name, answering=found is not None)
        self.fetched[name] = found["fetched"]["bytes"], found["fetched"]["result_bytes"]
        for version in found["versions"]:
            if version["chunks_held"] == version["chunks_total"]:
                self.arrivals.setdefault(version["version"], {}).setdefault(name, time.time())
        newest = max(found["versions"], key=lambda version: int(version["version"]))
        return RelayNow(name, True, newest["version"], newest["chunks_held"], newest["chunks_total"])

    def _worker(self, place: WorkerPlace) -> WorkerNow:
        record = self.ledger.record(*place.nodes)
        return WorkerNow(
            place=place,
            version=record.version,
            tokens=record.tokens,
            tokens_per_second=record.rate(now=time.monotonic()),
            admitted=record.admitted,
            rejected=record.rejected,
            main_reason=record.main_reason,
        )


def _read_progress(path: Path) -> dict[str, Any] | None:
    """Read the trainer's progress; None while it writes none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
