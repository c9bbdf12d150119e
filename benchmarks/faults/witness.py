"""Witness of the log: every checkpoint and entry that an outsider sees, and when it was first seen.

A witness asks as an auditor does, and believes as little. It runs in a thread, so that a coordinator that hangs holds
up nobody else.
"""

from __future__ import annotations

import bisect
import threading
import time
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Self

import msgspec

from coordinator.lab.processes.local_http import get, get_json
from node.audit.leaves import LeafTree
from node.protocol.checkpoints import Checkpoint, open_checkpoint
from node.protocol.merkle import ProofInvalid, verify_consistency
from node.protocol.messages import LogEntry
from node.protocol.run import open_descriptor
from shardcast.errors import PeerFault

INTERVAL_S = 0.25
TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class SeenEntry:
    """An entry and the time (monotonic seconds) at which it was first seen."""

    at: float
    entry: LogEntry


class Witness(threading.Thread):
    """Reads the log of the run `run_id` at `url` until `end`."""

    def __init__(self, url: str, *, run_id: str) -> None:
        super().__init__(name="witness", daemon=True)
        self.checkpoints: list[Checkpoint] = []
        self.leaves: list[bytes] = []
        self.seen: list[SeenEntry] = []
        self.problems: list[str] = []
        self._url = url
        self._run_id = run_id
        self._tree = LeafTree()
        self._looks: list[tuple[float, int]] = []
        self._ending = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self) -> None:
        while not self._ending.wait(INTERVAL_S):
            self.look()

    def end(self) -> None:
        """Stop looking; returns when nothing is asked any more."""
        self._ending.set()
        if self.is_alive():
            self.join()

    def size_after(self, moment: float) -> int | None:
        """Return the size that the first look after `moment` showed; None before one has ended."""
        looks = self._looks.copy()
        index = bisect.bisect_right(looks, moment, key=lambda look: look[0])
        return looks[index][1] if index < len(looks) else None

    def look(self) -> None:
        """Look once; a coordinator that is away or answers with an error shows nothing."""
        began = time.monotonic()
        try:
            checkpoint = read_checkpoint(self._url, run_id=self._run_id)
            if checkpoint is None:
                return
            self._take(checkpoint)
            while len(self.leaves) < checkpoint.size:
                if not self._read_on(checkpoint.size):
                    return
            self._looks.append((began, len(self.leaves)))
        except (OSError, HTTPException):
            return
        except PeerFault as error:
            self.problems.append(f"what the coordinator shows of its log is not the run's: {error}")
            return
        if checkpoint.size == len(self.leaves) and self._tree.root() != checkpoint.root:
            self.problems.append(f"the root of checkpoint {checkpoint.size} is not that of the entries shown")

    def _take(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint, and ask for the proof that it extends the one before."""
        before = self.checkpoints[-1] if self.checkpoints else None
        if before is not None and (before.size, before.root) == (checkpoint.size, checkpoint.root):
            return
        self.checkpoints.append(checkpoint)
        if before is None:
            return
        sizes = f"{before.size} to {checkpoint.size}"
        if checkpoint.size < before.size:
            self.problems.append(f"the log shrank: {sizes}")
            return
        asked = f"{self._url}/v1/log/consistency?first={before.size}&second={checkpoint.size}"
        reply = get_json(asked, seconds=TIMEOUT_S)
        if reply is None:
            return  # it has gone meanwhile; the roots are compared at the end
        try:
            check_extends(before, checkpoint, reply)
        except ProofInvalid as error:
            self.problems.append(f"no proof that the log of checkpoints {sizes} is one: {error}")

    def _read_on(self, size: int) -> bool:
        leaves = read_leaves(self._url, len(self.leaves), size)
        now = time.monotonic()
        for leaf in leaves:
            self._tree.append(leaf)
            self.leaves.append(leaf)
            self.seen.append(SeenEntry(now, msgspec.json.decode(leaf, type=LogEntry)))
        return bool(leaves)


def check_extends(before: Checkpoint, after: Checkpoint, reply: dict[str, Any]) -> None:
    """Raise ProofInvalid unless `reply` proves it."""
    verify_consistency(
        first=before.size,
        second=after.size,
        first_root=before.root,
        second_root=after.root,
        proof=[bytes.fromhex(value) for value in reply["hashes"]],
    )


def read_checkpoint(url: str, *, run_id: str) -> Checkpoint | None:
    """Read the signed checkpoint at `url`; None where the answer is an error. Raise OSError, HTTPException."""
    told, note = (get(f"{url}/v1/{path}", seconds=TIMEOUT_S) for path in ("run", "log/checkpoint"))
    if told is None or note is None:
        return None
    _, key = open_descriptor(told, run_id=run_id, now=0.0)
    return open_checkpoint(note, run_id=run_id, signer=key)


def read_leaves(url: str, start: int, end: int) -> list[bytes]:
    """Read some entries from `start`, none where the answer is an error. Raise OSError, HTTPException."""
    page = get(f"{url}/v1/log/entries?start={start}&end={end}", seconds=TIMEOUT_S)
    return page.splitlines() if page else []
