"""One file from an origin to all workers: published, waited for within a limit, checked, and metered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from benchmarks.broadcasting.processes import Node, NodeEnded

SETTLE_S = 1.0

_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Payload:
    """A file to publish, whose bytes no compression makes smaller."""

    path: Path
    size_bytes: int
    digest: str

    @classmethod
    def made(cls, path: Path, size_bytes: int) -> Payload:
        """`size_bytes` from BLAKE3's output stream, the same each time."""
        stream = blake3(b"benchmarks.broadcast")
        with path.open("wb") as file:
            for at in range(0, size_bytes, _PIECE_BYTES):
                file.write(stream.digest(length=min(_PIECE_BYTES, size_bytes - at), seek=at))
        return cls(path, size_bytes, digest_of(path))


def digest_of(path: Path) -> str:
    whole = blake3()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            whole.update(piece)
    return whole.hexdigest()


@dataclass(frozen=True, slots=True)
class Delivery:
    """`seconds` from the order to publish to the last worker, or all of the patience if one was not served."""

    seconds: float
    workers: int
    served: int
    cpu_s: float
    peak_bytes: int
    written_bytes: int


def deliver(
    payload: Payload,
    origin: Node,
    workers: Sequence[Node],
    *,
    nodes: Sequence[Node],
    patience_s: float,
    count: int = 1,
) -> Delivery:
    """Publish `payload` and wait for `count` workers in each of `workers`; a wrong file is none.

    `nodes` are those whose CPU time counts. Peak memory and bytes written are those of the worst process of `workers`.
    """
    before = [node.usage() for node in nodes]
    written = [worker.usage().written_bytes for worker in workers]
    started = time.monotonic()
    deadline = started + patience_s
    origin.send(publish=str(payload.path), version=1)
    origin.reply(patience_s)
    found = [reply for worker in workers for reply in _replies(worker, count, deadline)]
    cpu_s = sum(node.usage().cpu_s for node in nodes) - sum(usage.cpu_s for usage in before)
    usages = [worker.usage() for worker in workers]
    right = [at for path, at in found if at <= deadline and digest_of(path) == payload.digest]
    complete = len(right) == len(workers) * count
    return Delivery(
        seconds=max(right) - started if complete else patience_s,
        workers=len(workers) * count,
        served=len(right),
        cpu_s=cpu_s,
        peak_bytes=max(usage.peak_bytes for usage in usages),
        written_bytes=max(usage.written_bytes - then for usage, then in zip(usages, written, strict=True)),
    )


def _replies(worker: Node, count: int, deadline: float) -> list[tuple[Path, float]]:
    """The files that the workers in this process say they have, each with the time."""
    found: list[tuple[Path, float]] = []
    try:
        while len(found) < count:
            reply = worker.reply(deadline - time.monotonic())
            found.append((Path(reply["path"]), reply["at"]))
    except NodeEnded:
        pass
    return found
