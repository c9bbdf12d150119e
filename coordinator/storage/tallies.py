"""Verdict counters for the whole run, per minute, hour and day.

They are updated in the verdict's transaction, so that pages and metrics agree with the log without counting all
submissions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Connection, bindparam, case, literal_column, select
from sqlalchemy.dialects import postgresql, sqlite

from coordinator.storage.prepared import Prepared
from coordinator.storage.schema import verdict_tallies
from node.protocol.admission import Outcome, Verdict
from node.protocol.reasons import Reason

WHOLE_RUN: Final = 0
MINUTE, HOUR, DAY = 60, 3600, 86400
WIDTHS: Final = (WHOLE_RUN, MINUTE, HOUR, DAY)
"""Seconds per row; the whole run is one row that starts at 0."""

MAX_ROWS_PER_READ = 20_000


class VerdictKind(StrEnum):
    """First verdicts by full measurement or by one row, and second verdicts."""

    FULL = "full"
    SPOT = "spot"
    SECOND = "second"


@dataclass(frozen=True, slots=True)
class Tally:
    """Counter of one kind, outcome and reason from `start` (Unix seconds) on.

    `wait_seconds` is the sum of the seconds from arrival to verdict, `longest_wait` the maximum.
    """

    start: int
    kind: VerdictKind
    outcome: Outcome
    reason: Reason | None
    verdicts: int
    tokens: int
    wait_seconds: float
    longest_wait: float


def _counting(insert: Any) -> Any:
    """Return the statement that adds to the counters of each width what is the same of all: all but their starts."""
    columns = (one.name for one in verdict_tallies.columns)
    same: dict[str, Any] = {name: bindparam(name) for name in columns if name not in ("width", "start")}
    added = insert(verdict_tallies).values(
        [{"width": literal_column(str(width)), "start": bindparam(f"start_{width}"), **same} for width in WIDTHS]
    )
    new, old = added.excluded, verdict_tallies.c
    return added.on_conflict_do_update(
        index_elements=list(verdict_tallies.primary_key),
        set_={
            "verdicts": old.verdicts + new.verdicts,
            "tokens": old.tokens + new.tokens,
            "wait_seconds": old.wait_seconds + new.wait_seconds,
            "longest_wait": case((new.longest_wait > old.longest_wait, new.longest_wait), else_=old.longest_wait),
        },
    )


_COUNT: Final = {"sqlite": Prepared(_counting(sqlite.insert)), "postgresql": Prepared(_counting(postgresql.insert))}


def count_verdict(
    connection: Connection, kind: VerdictKind, verdict: Verdict, *, waited_seconds: float, now: float
) -> None:
    """Count one verdict made `now`, `waited_seconds` after its submission arrived."""
    statement, values = counting(connection, kind, verdict, waited_seconds=waited_seconds, now=now)
    statement.run(connection, values)


def counting(
    connection: Connection, kind: VerdictKind, verdict: Verdict, *, waited_seconds: float, now: float
) -> tuple[Prepared, dict[str, Any]]:
    """Return the statement of `count_verdict`, to be executed with others."""
    waited = max(0.0, waited_seconds)
    values = {"verdicts": 1, "tokens": verdict.tokens, "wait_seconds": waited, "longest_wait": waited}
    reason = "" if verdict.reason is None else verdict.reason.value
    key = {"kind": kind.value, "outcome": verdict.outcome.value, "reason": reason}
    starts = {f"start_{width}": _start(now, width) for width in WIDTHS}
    return _COUNT[connection.dialect.name], {**starts, **key, **values}


def _start(now: float, width: int) -> int:
    return int(now) // width * width if width else 0


def whole_run(connection: Connection) -> list[Tally]:
    """Return the counters of the whole run."""
    return since(connection, width=WHOLE_RUN, start=0)


def since(connection: Connection, *, width: int, start: int) -> list[Tally]:
    """Return the counters of one width from `start` on, oldest first, at most the newest MAX_ROWS_PER_READ."""
    columns = verdict_tallies.c
    query = select(verdict_tallies).where(columns.width == width, columns.start >= start)
    rows = connection.execute(query.order_by(columns.start.desc()).limit(MAX_ROWS_PER_READ)).all()
    return [
        Tally(
            start=row.start,
            kind=VerdictKind(row.kind),
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
    """Return the tokens of first admissions minus those that a second verdict did not confirm."""
    return sum(
        tally.tokens if tally.kind is not VerdictKind.SECOND else -tally.tokens
        for tally in tallies
        if (tally.outcome is Outcome.ADMITTED) == (tally.kind is not VerdictKind.SECOND)
    )
