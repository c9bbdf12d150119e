"""Submissions as receipts, pages and metrics read them; `work` and `verdicts` change them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, and_, bindparam, func, select

from coordinator.errors import StorageFault
from coordinator.storage.prepared import Prepared
from coordinator.storage.schema import (
    RECHECK_DUE,
    SubmissionState,
    groups,
    log_entries,
    log_nodes,
    slots,
    submissions,
)
from node.protocol import merkle
from node.protocol.messages import MAX_ENTRY_BYTES, VerdictEntry
from shardcast.errors import Malformed
from shardcast.wire import decode

MOST_LATEST: Final = 1000
QUEUED: Final = (SubmissionState.QUEUED, SubmissionState.VERIFYING)


@dataclass(frozen=True, slots=True)
class VerdictLeaf:
    """The first verdict on a submission as the log has it: the exact leaf, and the entry that it encodes."""

    log_index: int
    leaf: bytes
    entry: VerdictEntry


_JUDGED: Final = Prepared(
    select(submissions.c.state, submissions.c.log_index, log_entries.c.leaf, log_nodes.c.hash)
    .outerjoin(log_entries, log_entries.c.index == submissions.c.log_index)
    .outerjoin(log_nodes, and_(log_nodes.c.level == 0, log_nodes.c.index == submissions.c.log_index))
    .where(submissions.c.submission == bindparam("submission"))
)
_ENVELOPE: Final = Prepared(select(submissions.c.envelope).where(submissions.c.submission == bindparam("submission")))


@dataclass(frozen=True, slots=True)
class SubmissionRow:
    """A submission's row; blob names and log indices are None if there are none."""

    node: str
    request: str
    body: str
    body_bytes: int
    state: str
    received_at: float
    decided_at: float | None
    attempts: int
    evidence: str | None
    reason: str | None
    log_index: int | None
    recheck_index: int | None
    version: int
    slot: int
    candidate: int | None


@dataclass(frozen=True, slots=True)
class QueueLength:
    """Submissions waiting for a first verdict, arrival of the oldest, and those waiting for a second one."""

    first: int
    oldest_at: float | None
    second: int


def logged_verdict(connection: Connection, submission: str) -> VerdictLeaf | SubmissionState | None:
    """Return the log's first verdict on a submission, its state before there is one, None if it is unknown.

    Of the submission's own row, which can change, only the place in the log is believed, and that only if the leaf
    there is in the Merkle tree and is this submission's. Raises StorageFault otherwise.
    """
    row = _JUDGED.first(connection, {"submission": submission})
    if row is None:
        return None
    state, log_index, stored, leaf_hash = row
    if log_index is None and state in QUEUED:
        return SubmissionState(state)
    if stored is None or leaf_hash is None or merkle.leaf_hash(bytes(stored)) != bytes(leaf_hash):
        raise StorageFault(f"submission {submission} has no leaf in the log's tree at its place {log_index}")
    leaf = bytes(stored)
    try:
        entry = decode(VerdictEntry, leaf, max_bytes=MAX_ENTRY_BYTES)
    except Malformed as error:
        raise StorageFault(f"log entry {log_index}, of submission {submission}, is not a verdict") from error
    if entry.submission != submission or entry.recheck:
        raise StorageFault(f"log entry {log_index} is not the first verdict on submission {submission}")
    return VerdictLeaf(log_index=log_index, leaf=leaf, entry=entry)


def submission_row(connection: Connection, submission: str) -> SubmissionRow | None:
    """Return the row of `submission`, None if it is unknown."""
    of_slot = ("version", "slot", "candidate")
    columns = [submissions.c[name] for name in SubmissionRow.__dataclass_fields__ if name not in of_slot]
    columns += [slots.c.version, slots.c.number, slots.c.candidate]
    joined = select(*columns).join(slots, slots.c.id == submissions.c.slot_id)
    row = connection.execute(joined.where(submissions.c.submission == submission)).first()
    return None if row is None else SubmissionRow(*row)


def step_of(connection: Connection, submission: str) -> int | None:
    """Return the training step that used `submission`, None if none did."""
    found: int | None = connection.execute(select(groups.c.step).where(groups.c.submission == submission)).scalar()
    return found


def envelope_of(connection: Connection, submission: str) -> bytes | None:
    """Return the signed request in the row of `submission`; None if there is no such row, or no request in it."""
    found = _ENVELOPE.scalar(connection, {"submission": submission})
    return None if found is None else bytes(found)


_LATEST: Final = (
    select(submissions.c.slot_id, submissions.c.outcome)
    .where(submissions.c.state == SubmissionState.DONE)
    .order_by(submissions.c.received_at.desc())
    .limit(MOST_LATEST)
    .subquery()
)
_BY_ENVIRONMENT: Final = (
    select(slots.c.environment, _LATEST.c.outcome, func.count())
    .join(slots, slots.c.id == _LATEST.c.slot_id)
    .where(slots.c.environment.is_not(None))
    .group_by(slots.c.environment, _LATEST.c.outcome)
)


def latest_by_environment(connection: Connection) -> dict[int, Counter[str]]:
    """Count the last MOST_LATEST verdicts by outcome, for each environment of the run that slots are told apart by."""
    found: dict[int, Counter[str]] = {}
    for environment, outcome, count in connection.execute(_BY_ENVIRONMENT):
        found.setdefault(environment, Counter())[outcome] += count
    return found


def queue_length(connection: Connection) -> QueueLength:
    """Count the submissions waiting for a verdict."""
    waiting = submissions.c.state.in_(QUEUED)
    first = and_(waiting, submissions.c.recheck.is_(None))
    depth, oldest = connection.execute(select(func.count(), func.min(submissions.c.received_at)).where(first)).one()
    all_waiting = connection.execute(select(func.count()).where(waiting)).scalar_one()
    return QueueLength(first=int(depth), oldest_at=oldest, second=int(all_waiting) - int(depth))


def count_waiting(connection: Connection, state: SubmissionState) -> tuple[int, float | None]:
    """Return how many submissions are in `state`, and when the oldest without any verdict arrived."""
    waiting = submissions.c.state == state
    count = connection.execute(select(func.count()).where(waiting)).scalar_one()
    # Rechecks arrived long before they were queued.
    first = waiting, submissions.c.recheck.is_distinct_from(RECHECK_DUE)
    oldest = connection.execute(select(func.min(submissions.c.received_at)).where(*first)).scalar()
    return int(count), oldest
