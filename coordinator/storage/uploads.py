"""Bodies that senders upload to the object store: announced for a lease, submitted, judged, removed.

A lease has one upload, so that no node can fill the store. The verifier removes an upload once it has copied it to a
blob; `sweep` removes abandoned ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

from sqlalchemy import Connection, and_, bindparam, delete, insert, or_, select, update

from coordinator.storage.blobs import Upload, UploadStore
from coordinator.storage.database import Database
from coordinator.storage.schema import LeaseState, SubmissionState, leases, submissions, uploads
from node.protocol.reasons import Reason, Refusal

log = logging.getLogger(__name__)

OFFER_SECONDS: Final = 300
"""Validity of a presigned URL; an upload begun in time may take longer."""

SWEPT_AFTER_SECONDS: Final = 3600.0
SWEPT_AT_ONCE: Final = 100

_COLUMNS = (uploads.c.lease, uploads.c.body, uploads.c.sha256, uploads.c.body_bytes)
_OF_LEASE = select(*_COLUMNS).where(uploads.c.lease == bindparam("of_lease"))
_LOCK = select(leases.c.lease).where(leases.c.lease == bindparam("of_lease")).with_for_update()
_ASKED = update(uploads).where(uploads.c.lease == bindparam("of_lease")).values(asked_at=bindparam("now"))
_SUBMITTED = update(uploads).where(uploads.c.lease == bindparam("of_lease")).values(submission=bindparam("taken"))


def announce(connection: Connection, upload: Upload, *, now: float) -> None:
    """Record what the holder of a lease will upload; raises Refusal for a second body of the same lease."""
    connection.execute(_LOCK, {"of_lease": upload.lease})
    known = of_lease(connection, upload.lease)
    if known is None:
        connection.execute(insert(uploads).values(asdict(upload) | {"asked_at": now}))
        return
    if known != upload:
        raise Refusal(Reason.BODY_MISMATCH, f"Another body was announced for lease {upload.lease[:16]}….")
    connection.execute(_ASKED, {"of_lease": upload.lease, "now": now})


def of_lease(connection: Connection, lease: str) -> Upload | None:
    """Return the upload announced for a lease, None if there is none."""
    row = connection.execute(_OF_LEASE, {"of_lease": lease}).first()
    return None if row is None else Upload(*row)


def submitted(connection: Connection, upload: Upload, submission: str) -> None:
    """Link the upload to its submission, which keeps it from being swept until the verdict."""
    connection.execute(_SUBMITTED, {"of_lease": upload.lease, "taken": submission})


def of_submissions(connection: Connection, names: Iterable[str]) -> dict[str, Upload]:
    """Return the uploads, by submission, of those whose body is not yet a blob."""
    query = select(uploads.c.submission, *_COLUMNS).where(uploads.c.submission.in_(list(names)))
    return {row[0]: Upload(*row[1:]) for row in connection.execute(query)}


def forget(connection: Connection, upload: Upload) -> None:
    """Delete the row of an upload."""
    connection.execute(delete(uploads).where(uploads.c.lease == upload.lease))


def forget_all(connection: Connection) -> None:
    """Delete all rows, for a run restored into another store."""
    connection.execute(delete(uploads))


def sweep(database: Database, store: UploadStore, *, now: float) -> int:
    """Remove at most SWEPT_AT_ONCE abandoned or judged uploads and return how many; safe to run concurrently.

    Uploads waiting for a verdict stay. One that completes after its removal is left to the bucket's lifecycle rule
    (docs/operating.md).
    """
    given_up = leases.c.state.in_([LeaseState.EXPIRED, LeaseState.RETURNED, LeaseState.OVERTAKEN])
    ended = or_(given_up, leases.c.expires_at <= now - OFFER_SECONDS)
    abandoned = and_(uploads.c.submission.is_(None), ended)
    query = (
        select(*_COLUMNS)
        .join(leases, leases.c.lease == uploads.c.lease)
        .outerjoin(submissions, submissions.c.submission == uploads.c.submission)
        .where(
            uploads.c.asked_at <= now - SWEPT_AFTER_SECONDS,
            or_(abandoned, submissions.c.state.in_([SubmissionState.DONE, SubmissionState.EXPIRED])),
        )
        .limit(SWEPT_AT_ONCE)
    )
    with database.read() as connection:
        found = [Upload(*row) for row in connection.execute(query)]
    for upload in found:
        store.discard(upload)
        with database.write(durable=False) as connection:
            forget(connection, upload)
    if found:
        log.info("removed %d abandoned uploads", len(found))
    return len(found)
