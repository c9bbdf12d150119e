"""What `--keep-evidence` removes: the files of submissions whose verdict is old, once nothing of the run needs them.

Rows and log entries stay, so that receipts, standing, credit and an audit of the whole log do as before; what an
auditor derives from files ends with `evidence_expired` (docs/protocol.md, 8.4). Kept, whatever their age, are files of

- submissions that wait for a verdict, a second one or a rebuilt group;
- groups admitted by one row that a later rejection of their node would have measured again (not vested);
- groups that no step has used, or one that the trainer would train again from a checkpoint that it still has.

A batch's rows are marked in one transaction that also notes the names of its files; these are removed after it, and
after a crash in between by the next call.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from typing import Any, Final

from sqlalchemy import Connection, Select, and_, bindparam, or_, select, update

from coordinator.storage import locks
from coordinator.storage.blobs import BlobStore
from coordinator.storage.database import Database
from coordinator.storage.facts import put_fact, read_fact
from coordinator.storage.schema import SubmissionState, groups, steps, submissions
from coordinator.storage.standing import vested_before
from node.protocol.admission import Outcome
from node.protocol.run import RunSpec
from shardcast.wire import digest, encode

log = logging.getLogger(__name__)

EXPIRED_AT_ONCE: Final = 200
"""Submissions of one transaction: writers wait for its end."""

SWEEP_SECONDS: Final = 1.0
RESUMES_FROM: Final = "resumes_from"
"""Fact: the step of the oldest checkpoint that the trainer holds; without it no trained group expires."""
_REMOVING: Final = "expired_files"
"""Fact: names of blobs of expired submissions that may still be in the store, as JSON."""


def remove_expired(database: Database, blobs: BlobStore, *, spec: RunSpec, before: float) -> int:
    """Remove the files of submissions decided before then (Unix seconds), for SWEEP_SECONDS; return of how many.

    One process at a time. Raises DatabaseFault, and OSError where the store is away: the next call goes on.
    """
    deadline = time.monotonic() + SWEEP_SECONDS
    expired = 0
    while time.monotonic() < deadline:
        with database.write() as connection:
            left = json.loads(read_fact(connection, _REMOVING) or "[]")
            count, names = (0, left) if left else _expire(connection, spec=spec, before=before)
            names = sorted(set(names) - _still_named(connection, names) - {digest(encode(spec))})
            if left or count:
                put_fact(connection, _REMOVING, json.dumps(names))
        expired += count
        if not names and not count:
            break
        for name in names:
            blobs.remove(name)
        with database.write(durable=False) as connection:
            put_fact(connection, _REMOVING, "[]")
    if expired:
        log.info("removed the files of %d submissions, decided long enough ago", expired)
    return expired


def is_expired(connection: Connection, name: str) -> bool:
    """Return whether blob `name` is the request or the body of a submission whose files were removed."""
    query = select(submissions.c.submission).where(
        or_(submissions.c.submission == name, submissions.c.body == name),
        submissions.c.state == SubmissionState.EXPIRED,
    )
    return connection.execute(query.limit(1)).first() is not None


def note_checkpoints(connection: Connection, step: int) -> None:
    """Record that the trainer may go back to `step`, and to none before it."""
    put_fact(connection, RESUMES_FROM, str(step))


def _resumes_from(connection: Connection) -> int:
    return int(read_fact(connection, RESUMES_FROM) or 0)


def _expire(connection: Connection, *, spec: RunSpec, before: float) -> tuple[int, list[str]]:
    """Mark at most EXPIRED_AT_ONCE submissions; return how many, and the names of their blobs."""
    locks.deciding(connection)
    values = {"before": before, "resumes_from": _resumes_from(connection)}
    rows = connection.execute(_old(spec), values).all()
    ids = [row.submission for row in rows]
    if ids:
        expired = update(submissions).where(submissions.c.submission.in_(ids))
        connection.execute(expired.values(state=SubmissionState.EXPIRED, evidence=None, envelope=None))
        connection.execute(update(groups).where(groups.c.submission.in_(ids)).values(blob=""))
    return len(ids), [name for row in rows for name in (row.request, row.body, row.evidence, row.blob) if name]


def _old(spec: RunSpec) -> Select[Any]:
    """Return the submissions whose files nothing needs any more, by arrival."""
    vested = submissions.c.log_index <= vested_before(submissions.c.node, rules=spec.standing)
    settled = or_(
        submissions.c.spot.is_(None),
        submissions.c.outcome != Outcome.ADMITTED,
        submissions.c.recheck.is_not(None),
        vested,
    )
    is_trained = and_(steps.c.finished_at < bindparam("before"), groups.c.step < bindparam("resumes_from"))
    return (
        select(
            submissions.c.submission,
            submissions.c.request,
            submissions.c.body,
            submissions.c.evidence,
            groups.c.blob,
        )
        .outerjoin(groups, groups.c.submission == submissions.c.submission)
        .outerjoin(steps, steps.c.step == groups.c.step)
        .where(
            submissions.c.state == SubmissionState.DONE,
            submissions.c.received_at < bindparam("before"),
            submissions.c.decided_at < bindparam("before"),
            # Of a second verdict: when it was.
            or_(submissions.c.recheck_by.is_(None), submissions.c.recheck_by < bindparam("before")),
            or_(groups.c.slot_id.is_(None), is_trained),
            settled,
        )
        .order_by(submissions.c.received_at)
        .limit(EXPIRED_AT_ONCE)
    )


def _still_named(connection: Connection, names: Iterable[str]) -> set[str]:
    """Return those of `names` that submissions with files name, too: anybody may send what somebody else has sent.

    Not looked for are kept measurements with the very same bytes, and groups of steps before the trainer's oldest
    checkpoint, which only pages and exports read.
    """
    wanted, has_files = list(names), submissions.c.state != SubmissionState.EXPIRED
    may_train = or_(groups.c.step.is_(None), groups.c.step >= _resumes_from(connection))
    found: set[str] = set()
    for column, condition in (
        (submissions.c.submission, and_(submissions.c.submission.in_(wanted), has_files)),
        (submissions.c.body, and_(submissions.c.body.in_(wanted), has_files)),
        (groups.c.blob, and_(groups.c.blob.in_(wanted), may_train)),
    ):
        found |= set(connection.execute(select(column).where(condition)).scalars())
    return found
