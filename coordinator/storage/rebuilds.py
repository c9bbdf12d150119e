"""Admitted groups whose blob is lost: their submissions are queued once more, for a verifier to make the blob anew.

The verdict stands and the log gets no entry, since it names the submission and not the blob that training reads. In the
queue a rebuild is a submission that has its outcome and is due for no second verdict (`verdicts.QueueItem.rebuild`).
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, and_, select, update

from coordinator.errors import StorageFault
from coordinator.storage import locks
from coordinator.storage.derived_rows import is_waiting
from coordinator.storage.schema import RECHECK_DUE, SubmissionState, groups, log_entries, steps, submissions
from coordinator.storage.verdicts import MAX_ATTEMPTS, QueueItem, is_held
from node.protocol.admission import Outcome
from node.protocol.messages import MAX_ENTRY_BYTES, LogEntry, VerdictEntry
from shardcast.wire import decode


@dataclass(frozen=True, slots=True)
class AdmittedGroup:
    """What is recorded of a group: its blob, the evidence's, its rewards in the log.

    `is_trained`: a published policy was trained on it, which no other bytes would reproduce.
    """

    blob: str
    body: str
    rewards: tuple[float, ...]
    is_trained: bool


def request(connection: Connection, submission: str) -> None:
    """Queue the submission of a lost group, unless it is in the queue for another reason."""
    locks.deciding(connection)
    row = update(submissions).where(
        submissions.c.submission == submission,
        submissions.c.state == SubmissionState.DONE,
        submissions.c.outcome == Outcome.ADMITTED,
    )
    connection.execute(row.values(state=SubmissionState.QUEUED, verifier=None, claimed_until=None, attempts=0))


def is_queued(connection: Connection, submission: str) -> bool:
    """Return whether the submission waits for a verifier, or is at one."""
    state = connection.execute(select(submissions.c.state).where(submissions.c.submission == submission)).scalar_one()
    return is_waiting(state)


def blob_of(connection: Connection, submission: str) -> str:
    """Return the name of the blob with the group of `submission`."""
    found: str = connection.execute(select(groups.c.blob).where(groups.c.submission == submission)).scalar_one()
    return found


def admitted_group(connection: Connection, submission: str) -> AdmittedGroup:
    """Return what is recorded of the group of `submission`; raises StorageFault."""
    query = (
        select(groups.c.blob, submissions.c.body, steps.c.finished_at, log_entries.c.leaf)
        .join(submissions, submissions.c.submission == groups.c.submission)
        .join(log_entries, log_entries.c.index == submissions.c.log_index)
        .outerjoin(steps, steps.c.step == groups.c.step)
        .where(groups.c.submission == submission)
    )
    row = connection.execute(query).first()
    if row is None:
        raise StorageFault(
            f"the group of submission {submission} is not in the database, or its verdict not in the log"
        )
    entry: LogEntry = decode(LogEntry, bytes(row.leaf), max_bytes=MAX_ENTRY_BYTES)  # type: ignore[arg-type]
    rewards = entry.rewards if isinstance(entry, VerdictEntry) else None
    return AdmittedGroup(row.blob, row.body, tuple(rewards or ()), is_trained=row.finished_at is not None)


def finish(connection: Connection, claimed: QueueItem, *, blob: str | None, again: bool = False) -> bool:
    """Take a rebuild out of the queue, with the group's new `blob` if there is one; return False if it is too late.

    `again`: a verifier could not tell, so it stays in the queue while it has attempts left. Without a blob only the
    claim's holder ends it: the next verifier may succeed.
    """
    locks.deciding(connection)
    retried = again and claimed.attempts + 1 < MAX_ATTEMPTS
    queued = and_(
        submissions.c.submission == claimed.submission,
        submissions.c.state.not_in((SubmissionState.DONE, SubmissionState.EXPIRED)),
        submissions.c.recheck.is_distinct_from(RECHECK_DUE),
    )
    state = SubmissionState.QUEUED if retried else SubmissionState.DONE
    mine = queued if blob is not None else and_(queued, is_held(claimed))
    if not connection.execute(update(submissions).where(mine).values(state=state, verifier=None)).rowcount:
        return False
    if blob is not None:
        connection.execute(update(groups).where(groups.c.submission == claimed.submission).values(blob=blob))
    return True
