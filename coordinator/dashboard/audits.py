"""The auditor's page: the signed checkpoint, the log's newest entries, and how to verify them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.dashboard.figures import read_entry
from coordinator.dashboard.formatting import name_of
from coordinator.run.service import Coordinator
from coordinator.storage import log
from coordinator.storage.log import MAX_ENTRIES_PER_READ
from node.protocol.checkpoints import Checkpoint, log_key, open_checkpoint
from node.protocol.messages import BatchEntry, PolicyEntry, RunEntry, VerdictEntry

ENTRIES: Final = 25
PARTS: Final = 6
MAX_LINE: Final = 180


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log entry in words; `submission` is the one that it is about, or ""."""

    index: int
    kind: str
    text: str
    submission: str


@dataclass(frozen=True, slots=True)
class AuditView:
    """The content of the page. `entries` are newest first, down to index `first`; `older` and `newer` are the
    `at` of the next pages, None at the ends; `parts` are the newest ranges of the log to download, (start, end)."""

    checkpoint: Checkpoint
    note: str
    key: str
    spec_digest: str
    entries: Sequence[LogLine]
    first: int
    older: int | None
    newer: int | None
    parts: Sequence[tuple[int, int]]
    earlier_parts: int


def read_audit(coordinator: Coordinator, *, at: int | None) -> AuditView:
    """Read the auditor's page with the ENTRIES log entries before index `at`, by default the newest."""
    home, note = coordinator.home, coordinator.checkpoint()
    checkpoint = open_checkpoint(note, run_id=home.run_id, signer=home.public_key)
    end = checkpoint.size if at is None else max(1, min(at, checkpoint.size))
    first = max(0, end - ENTRIES)
    with home.database.read() as connection:
        leaves = log.leaves(connection, first, end)
    starts = range(0, checkpoint.size, MAX_ENTRIES_PER_READ)
    return AuditView(
        checkpoint=checkpoint,
        note=note.decode(),
        key=str(log_key(home.run_id, home.public_key)),
        spec_digest=home.spec.digest,
        entries=[_entry(first + offset, leaf) for offset, leaf in enumerate(leaves)][::-1],
        first=first,
        older=first or None,
        newer=min(checkpoint.size, end + ENTRIES) if end < checkpoint.size else None,
        parts=[(start, min(start + MAX_ENTRIES_PER_READ, checkpoint.size)) for start in starts[-PARTS:]][::-1],
        earlier_parts=max(0, len(starts) - PARTS),
    )


def _entry(index: int, leaf: bytes) -> LogLine:
    entry = read_entry(leaf)
    match entry:
        case RunEntry():
            return LogLine(index, "run", f"rules {entry.spec_digest[:16]}…", "")
        case PolicyEntry():
            return LogLine(index, "policy", f"policy {entry.version}, manifest {entry.manifest_digest[:16]}…", "")
        case BatchEntry():
            return LogLine(index, "batch", f"step {entry.step + 1} uses {len(entry.submissions):,} groups", "")
        case VerdictEntry():
            why = f", {name_of(entry.reason)}" if entry.reason is not None else ""
            again = ", second verdict" if entry.recheck else ""
            text = f"slot {entry.version}/{entry.slot} {entry.outcome.value}{why}{again}"
            return LogLine(index, "verdict", text, entry.submission)
    return LogLine(index, "unknown", leaf[:MAX_LINE].decode(errors="replace"), "")
