"""Submissions as receipts, pages and metrics read them; `work` and `verdicts` change them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, and_, bindparam, func, select

from coordinator.storage.schema import RECHECK_DUE, SubmissionState, groups, log_entries, slots, submissions

QUEUED: Final = (SubmissionState.QUEUED, SubmissionState.VERIFYING)


@dataclass(frozen=True, slots=True)
class ReceiptRow:
    """The content of a receipt; `leaf` is the verdict's log entry, None before the verdict."""

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


@dataclass(frozen=True, slots=True)
class QueueLength:
    """Submissions waiting for a first verdict, arrival of the oldest, and those waiting for a second one."""

    first: int
    oldest_at: float | None
    second: int


def receipt_row(connection: Connection, submission: str) -> ReceiptRow | None:
    """Return the content of a submission's receipt, None if it is unknown."""
    row = connection.execute(_JUDGED, {"submission": submission}).first()
    return None if row is None else ReceiptRow(*tuple(row))


def submission_row(connection: Connection, submission: str) -> SubmissionRow | None:
    """Return the row of `submission`, None if it is unknown."""
    columns = [submissions.c[name] for name in SubmissionRow.__dataclass_fields__ if name not in ("version", "slot")]
    columns += [slots.c.version, slots.c.number]
    joined = select(*columns).join(slots, slots.c.id == submissions.c.slot_id)
    row = connection.execute(joined.where(submissions.c.submission == submission)).first()
    return None if row is None else SubmissionRow(*row)


def step_of(connection: Connection, submission: str) -> int | None:
    """Return the training step that used `submission`, None if none did."""
    found: int | None = connection.execute(select(groups.c.step).where(groups.c.submission == submission)).scalar()
    return found


def queue_length(connection: Connection) -> QueueLength:
    """Count the submissions waiting for a verdict."""
    waiting = submissions.c.state.in_(QUEUED)
    # Not `recheck IS NULL`, whose index would be used, and holds nearly all submissions.
    first = and_(waiting, func.coalesce(submissions.c.recheck, "") == "")
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
