"""Totals over a whole run, for status, metrics and dashboard, at a cost independent of the run's length."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, func, select

from coordinator.storage import tallies
from coordinator.storage.progress import progress
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


@dataclass(slots=True)
class _Settled:
    """Counts of the slots of versions before `before`, which are all in a final state."""

    before: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


_FINAL = (SlotState.USED, SlotState.STALE, SlotState.SET_ASIDE)
_LIVE = tuple(state for state in SlotState if state not in _FINAL)
_settled: WeakKeyDictionary[Engine, _Settled] = WeakKeyDictionary()


def slot_counts(connection: Connection) -> dict[str, int]:
    """Count the slots in each state.

    Versions with final states alone are counted once per process: slots are opened at the newest version only, and
    used, stale and set-aside ones never change.
    """
    counts = Counter[str]()
    live = select(slots.c.state, func.count(), func.min(slots.c.version)).where(slots.c.state.in_(_LIVE))
    before = progress(connection).head
    for state, count, oldest in connection.execute(live.group_by(slots.c.state)):
        counts[state] = int(count)
        before = min(before, oldest)
    settled = _settled.setdefault(connection.engine, _Settled())
    with settled.lock:
        known = settled.before
        is_old = slots.c.version < before  # one object, or PostgreSQL sees two parameters and refuses GROUP BY
        final = select(slots.c.state, is_old, func.count()).where(slots.c.state.in_(_FINAL))
        since = final.where(slots.c.version >= known).group_by(slots.c.state, is_old)
        for state, is_settled, count in connection.execute(since):
            (settled.counts if is_settled else counts)[state] += int(count)
        settled.before = max(known, before)
        counts += settled.counts
    return {state.value: counts[state.value] for state in SlotState}


def count_leases(connection: Connection, state: LeaseState) -> int:
    """Return how many leases are in `state`."""
    return int(connection.execute(select(func.count()).where(leases.c.state == state)).scalar_one())


def first_verdict_at(connection: Connection) -> int | None:
    """Return the start of the minute of the first verdict in Unix seconds, None before it."""
    begun = select(func.min(verdict_tallies.c.start)).where(verdict_tallies.c.width == MINUTE)
    found: int | None = connection.execute(begun).scalar()
    return found
