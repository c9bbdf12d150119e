"""Reads judged submissions in log order, page by page."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sqlalchemy import select

from coordinator.storage.database import Database
from coordinator.storage.schema import groups, slots, submissions
from node.protocol.admission import Outcome

_PAGE = 5000


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """A submission with its verdict.

    `body` and `blob` name the blobs of its file and of its admitted group; `blob` is None if it was not admitted.
    `step` is the training step that used it, `recheck` the outcome of a second verdict.
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
        )
        .join(slots, slots.c.id == submissions.c.slot_id)
        .outerjoin(groups, groups.c.submission == submissions.c.submission)
        .where(submissions.c.outcome.in_(outcomes))
        .order_by(submissions.c.log_index)
        .limit(_PAGE)
    )
    after = -1
    while True:
        with database.read() as connection:
            page = [
                JudgedRow(**row) for row in connection.execute(query.where(submissions.c.log_index > after)).mappings()
            ]
        if not page:
            return
        yield from page
        after = page[-1].log_index
