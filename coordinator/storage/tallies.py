"""Verdicts, counted as they are made: in all, and by the minute, the hour and the day.

What the pages and the metrics show would else be a count over all submissions, which takes longer the longer a run has
been going. The counts change in the transaction of the verdict, so that they are never of anything else than the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Connection, case, select
from sqlalchemy.dialects import postgresql, sqlite

from coordinator.storage.schema import verdict_tallies
from node.protocol.admission import Outcome
from node.protocol.reasons import Reason

WHOLE_RUN: Final = 0
MINUTE, HOUR, DAY = 60, 3600, 86400
WIDTHS: Final = (WHOLE_RUN, MINUTE, HOUR, DAY)
"""Seconds that one row counts; the whole run is one row that starts at 0."""

MAX_ROWS_PER_READ = 20_000
_INSERT = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class Kind(StrEnum):
    """First verdicts by how many rows were measured, and second ones."""

    FULL = "full"
    SPOT = "spot"
    SECOND = "second"


@dataclass(frozen=True, slots=True)
class Tally:
    """Verdicts of one kind, outcome and reason in `width` seconds from `start` on.

    `wait_seconds` is the sum of what they waited for from the submission's arrival on, `longest_wait` the largest.
    """

    start: int
    kind: Kind
    outcome: Outcome
    reason: Reason | None
    verdicts: int
    tokens: int
    wait_seconds: float
    longest_wait: float


def count_verdict(
    connection: Connection,
    kind: Kind,
    outcome: Outcome,
    reason: Reason | None,
    *,
    tokens: int,
    waited_seconds: float,
    now: float,
) -> None:
    """Count one verdict that is made `now`, `waited_seconds` after its submission came."""
    waited = max(0.0, waited_seconds)
    values = {"verdicts": 1, "tokens": tokens, "wait_seconds": waited, "longest_wait": waited}
    key = {"kind": kind.value, "outcome": outcome.value, "reason": "" if reason is None else reason.value}
    rows = [{"width": width, "start": _start(now, width), **key, **values} for width in WIDTHS]
    added: Any = _INSERT[connection.dialect.name](verdict_tallies).values(rows)
    new, old = added.excluded, verdict_tallies.c
    connection.execute(
        added.on_conflict_do_update(
            index_elements=list(verdict_tallies.primary_key),
            set_={
                "verdicts": old.verdicts + new.verdicts,
                "tokens": old.tokens + new.tokens,
                "wait_seconds": old.wait_seconds + new.wait_seconds,
                "longest_wait": case((new.longest_wait > old.longest_wait, new.longest_wait), else_=old.longest_wait),
            },
        )
    )


def _start(now: float, width: int) -> int:
    return int(now) // width * width if width else 0


def whole_run(connection: Connection) -> list[Tally]:
    """All verdicts so far."""
    return since(connection, width=WHOLE_RUN, start=0)


def since(connection: Connection, *, width: int, start: int) -> list[Tally]:
    """The tallies of one width from `start` on, in their order; the newest MAX_ROWS_PER_READ of them."""
    columns = verdict_tallies.c
    query = select(verdict_tallies).where(columns.width == width, columns.start >= start)
    rows = connection.execute(query.order_by(columns.start.desc()).limit(MAX_ROWS_PER_READ)).all()
    return [
        Tally(
            start=row.start,
            kind=Kind(row.kind),
            outcome=Outcome(row.outcome),
            reason=Reason(row.reason) if row.reason else None,
            verdicts=row.verdicts,
            tokens=row.tokens,
            wait_seconds=row.wait_seconds,
            longest_wait=row.longest_wait,
        )
        for row in reversed(rows)
    ]


def admitted_tokens(tallies: Sequence[Tally]) -> int:
    """Tokens of the groups among these that count: admitted at first, and not taken back by a second verdict."""
    return sum(
        tally.tokens if tally.kind is not Kind.SECOND else -tally.tokens
        for tally in tallies
        if (tally.outcome is Outcome.ADMITTED) == (tally.kind is not Kind.SECOND)
    )
