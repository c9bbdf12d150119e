"""Submissions as others look at them: by id, and those that wait. Taking and judging them is in `work`, `verdicts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, and_, bindparam, func, select

from coordinator.storage.schema import RECHECK_DUE, SubmissionState, groups, log_entries, slots, submissions

QUEUED: Final = (SubmissionState.QUEUED, SubmissionState.VERIFYING)


@dataclass(frozen=True, slots=True)
class JudgedSubmission:
    """What a receipt tells of a submission; `leaf` is the log's entry of its verdict, None before there is one."""

    node: str
    state: str
    outcome: str
    reason: str | None
    detail: str
    tokens: int
    log_index: int
    version: int
    slot: int
    leaf: bytes | None


_JUDGED: Final = (
    select(
        *(submissions.c[name] for name in ("node", "state", "outcome", "reason", "detail", "tokens", "log_index")),
        *(slots.c.version, slots.c.number, log_entries.c.leaf),
    )
    .join(slots, slots.c.id == submissions.c.slot_id)
    .outerjoin(log_entries, log_entries.c.index == submissions.c.log_index)
    .where(submissions.c.submission == bindparam("submission"))
)


@dataclass(frozen=True, slots=True)
class SubmissionRow:
    """What the database keeps of a submission; names of blobs and log indices are None where there are none."""

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


@dataclass(frozen=True, slots=True)
class QueueLength:
    """What waits for a first verdict, since when the oldest does, and what waits for a second one."""

    first: int
    oldest_at: float | None
    second: int


def judged_submission(connection: Connection, submission: str) -> JudgedSubmission | None:
    """Return what a receipt tells of `submission`, None if nobody sent it."""
    row = connection.execute(_JUDGED, {"submission": submission}).first()
    return None if row is None else JudgedSubmission(*tuple(row))


def submission_row(connection: Connection, submission: str) -> SubmissionRow | None:
    """Return the row of `submission`, None if nobody sent it."""
    columns = [submissions.c[name] for name in SubmissionRow.__dataclass_fields__ if name not in ("version", "slot")]
    columns += [slots.c.version, slots.c.number]
    joined = select(*columns).join(slots, slots.c.id == submissions.c.slot_id)
    row = connection.execute(joined.where(submissions.c.submission == submission)).first()
    return None if row is None else SubmissionRow(*row)


def step_of(connection: Connection, submission: str) -> int | None:
    """Return the training step that used `submission`, None if none has."""
    found: int | None = connection.execute(select(groups.c.step).where(groups.c.submission == submission)).scalar()
    return found


def queue_length(connection: Connection) -> QueueLength:
    """Count what waits for a verdict."""
    waiting = submissions.c.state.in_(QUEUED)
    # Not `recheck IS NULL`, of which there is an index: nearly all submissions are in it.
    first = and_(waiting, func.coalesce(submissions.c.recheck, "") == "")
    depth, oldest = connection.execute(select(func.count(), func.min(submissions.c.received_at)).where(first)).one()
    all_waiting = connection.execute(select(func.count()).where(waiting)).scalar_one()
    return QueueLength(first=int(depth), oldest_at=oldest, second=int(all_waiting) - int(depth))


def count_waiting(connection: Connection, state: SubmissionState) -> tuple[int, float | None]:
    """Return how many submissions are in `state`, and when the oldest of them came that has no verdict yet."""
    waiting = submissions.c.state == state
    count = connection.execute(select(func.count()).where(waiting)).scalar_one()
    # What is due for a second verdict came long before it was queued.
    first = waiting, submissions.c.recheck.is_distinct_from(RECHECK_DUE)
    oldest = connection.execute(select(func.min(submissions.c.received_at)).where(*first)).scalar()
    return int(count), oldest
