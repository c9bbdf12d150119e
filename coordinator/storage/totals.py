"""Totals over a whole run, for status, metrics and dashboard, at a cost independent of the run's length."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import Connection, func, select

from coordinator.storage import tallies
from coordinator.storage.counters import SETTLED, settled_slots
from coordinator.storage.schema import RECHECK_DUE, LeaseState, SlotState, leases, slots, submissions, verdict_tallies
from coordinator.storage.tallies import MINUTE, VerdictKind
from node.protocol.admission import Outcome


def reason_totals(connection: Connection) -> list[tuple[str, str | None, int]]:
    """Return (outcome, reason, count) of all first verdicts."""
    found = Counter[tuple[str, str]]()
    for tally in tallies.whole_run(connection):
        if tally.kind is not VerdictKind.SECOND:
            found[tally.outcome.value, tally.reason.value if tally.reason else ""] += tally.verdicts
    return [(outcome, reason or None, count) for (outcome, reason), count in sorted(found.items())]


def partly_measured(connection: Connection) -> dict[str, int]:
    """Count the groups admitted by one row: `pending`, `due`, or by the outcome of the second verdict."""
    counted = tallies.whole_run(connection)
    spot = sum(
        tally.verdicts for tally in counted if tally.kind is VerdictKind.SPOT and tally.outcome is Outcome.ADMITTED
    )
    second = Counter[str]()
    for tally in counted:
        if tally.kind is VerdictKind.SECOND:
            second[tally.outcome.value] += tally.verdicts
    due = connection.execute(select(func.count()).where(submissions.c.recheck == RECHECK_DUE)).scalar_one()
    found = {"pending": spot - int(due) - second.total(), RECHECK_DUE: int(due), **second}
    return {state: count for state, count in found.items() if count}


_LIVE = tuple(state for state in SlotState if state not in SETTLED)


def slot_counts(connection: Connection) -> dict[str, int]:
    """Count the slots in each state."""
    counts = settled_slots(connection)
    live = select(slots.c.state, func.count()).where(slots.c.state.in_(_LIVE)).group_by(slots.c.state)
    counts.update({state: int(count) for state, count in connection.execute(live)})
    return {state.value: counts[state] for state in SlotState}


def active_leases(connection: Connection) -> int:
    """Return how many leases nodes hold."""
    return int(connection.execute(select(func.count()).where(leases.c.state == LeaseState.ACTIVE)).scalar_one())


def first_verdict_at(connection: Connection) -> int | None:
    """Return the start of the minute of the first verdict in Unix seconds, None before it."""
    begun = select(func.min(verdict_tallies.c.start)).where(verdict_tallies.c.width == MINUTE)
    found: int | None = connection.execute(begun).scalar()
    return found
