"""Reads judged submissions in log order, page by page."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select

from coordinator.storage.database import Database
from coordinator.storage.derived_rows import leaves_from
from coordinator.storage.schema import SubmissionState, groups, slots, submissions
from node.protocol.admission import Outcome

_VERDICT: Final = b'{"type":"verdict","submission":"'
_NAMED: Final = slice(len(_VERDICT), len(_VERDICT) + 64)


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """A submission with its verdict.

    `body` and `blob` name the blobs of its file and of its admitted group; `blob` is None if it was not admitted.
    `step` is the training step that used it, `recheck` the outcome of a second verdict. The files of one that
    `is_expired` are removed (`coordinator.storage.retention`).
    """

    log_index: int
    submission: str
    node: str
    version: int
    slot: int
    outcome: Outcome
    reason: str | None
    recheck: str | None
    body: str
    blob: str | None
    step: int | None
    is_expired: bool


def judged(database: Database, outcomes: Collection[Outcome]) -> Iterator[JudgedRow]:
    """Yield every submission with one of `outcomes` in log order, holding no transaction between pages."""
    query = (
        select(
            submissions.c.log_index,
            submissions.c.submission,
            submissions.c.node,
            slots.c.version,
            slots.c.number.label("slot"),
            submissions.c.outcome,
            submissions.c.reason,
            submissions.c.recheck,
            submissions.c.body,
            groups.c.blob,
            groups.c.step,
            (submissions.c.state == SubmissionState.EXPIRED).label("is_expired"),
        )
        .join(slots, slots.c.id == submissions.c.slot_id)
        .outerjoin(groups, groups.c.submission == submissions.c.submission)
        .where(submissions.c.outcome.in_(outcomes))
        .order_by(submissions.c.log_index)
    )
    start = 0
    while True:
        # By the names in the log: no index has the rows in its order, and each page would read and sort all of them.
        with database.read() as connection:
            leaves = leaves_from(connection, start)
            names = [leaf[_NAMED].decode() for _, leaf in leaves if leaf.startswith(_VERDICT)]
            first = submissions.c.log_index.between(start, start + len(leaves) - 1)
            found = connection.execute(query.where(submissions.c.submission.in_(names), first))
            page = [JudgedRow(**row) for row in found.mappings()]
        if not leaves:
            return
        yield from page
        start += len(leaves)
