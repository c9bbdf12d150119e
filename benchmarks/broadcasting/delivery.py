"""One broadcast of a file from an origin to all workers: published, awaited with a timeout, checked, and metered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from benchmarks.broadcasting.processes import Node, NodeEnded
from shardcast.content import file_digest

SETTLE_S = 1.0

_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class BroadcastFile:
    """Incompressible file to publish."""

    path: Path
    size_bytes: int
    digest: str

    @classmethod
    def made(cls, path: Path, size_bytes: int) -> BroadcastFile:
        """Write `size_bytes` of BLAKE3's output stream, the same each time."""
        stream = blake3(b"benchmarks.broadcast")
        with path.open("wb") as file:
            for at in range(0, size_bytes, _PIECE_BYTES):
                file.write(stream.digest(length=min(_PIECE_BYTES, size_bytes - at), seek=at))
        return cls(path, size_bytes, file_digest(path))


@dataclass(frozen=True, slots=True)
class Setting:
    """A file, its broadcasts, and where their processes keep files.

    `bytes_per_s` is the speed of capped uplinks. A worker without the file after `patience_s` is never served.
    """

    payload: BroadcastFile
    repeats: int
    patience_s: float
    within: Path | None
    bytes_per_s: float = 0.0


class WorkerNotServed(Exception):
    """A worker got nothing in time, so that there is no time to compare."""


@dataclass(frozen=True, slots=True)
class BroadcastResult:
    """Result of a broadcast.

    `seconds` run from the order to publish to the last worker; they are the whole patience if one was not served.
    """

    seconds: float
    workers: int
    served: int
    cpu_s: float
    peak_bytes: int
    written_bytes: int

    def complete_seconds(self) -> float:
        """Return the seconds; raise WorkerNotServed if a worker was not served."""
        if self.served < self.workers:
            raise WorkerNotServed(f"{self.workers - self.served} of {self.workers} workers were not served")
        return self.seconds


def deliver(
    setting: Setting, origin: Node, workers: Sequence[Node], *, nodes: Sequence[Node] = (), count: int = 1
) -> BroadcastResult:
    """Wait until everybody is ready, publish, and await `count` workers in each of `workers`; a wrong file is none.

    `nodes` are those whose CPU time counts. Peak memory and bytes written are those of the worst process of `workers`.
    """
    for worker in workers:
        worker.ready()
    time.sleep(SETTLE_S)
    payload, patience_s = setting.payload, setting.patience_s
    before = [node.usage() for node in nodes]
    written = [worker.usage().written_bytes for worker in workers]
    started = time.monotonic()
    deadline = started + patience_s
    origin.send(publish=str(payload.path), version=1)
    origin.reply(patience_s)
    found = [reply for worker in workers for reply in _replies(worker, count, deadline)]
    cpu_s = sum(node.usage().cpu_s for node in nodes) - sum(usage.cpu_s for usage in before)
    usages = [worker.usage() for worker in workers]
    right = [at for path, at in found if at <= deadline and file_digest(path) == payload.digest]
    complete = len(right) == len(workers) * count
    return BroadcastResult(
        seconds=max(right) - started if complete else patience_s,
        workers=len(workers) * count,
        served=len(right),
        cpu_s=cpu_s,
        peak_bytes=max(usage.peak_bytes for usage in usages),
        written_bytes=max(usage.written_bytes - then for usage, then in zip(usages, written, strict=True)),
    )


def _replies(worker: Node, count: int, deadline: float) -> list[tuple[Path, float]]:
    """Collect the files that the workers in this process report, each with the time."""
    found: list[tuple[Path, float]] = []
    try:
        while len(found) < count:
            reply = worker.reply(deadline - time.monotonic())
            found.append((Path(reply["path"]), reply["at"]))
    except NodeEnded:
        pass
    return found
