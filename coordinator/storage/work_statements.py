"""The statements of `work`, built once: SQLAlchemy takes three times as long to build one as to run it.

Their parameters are named. A column that is one of a few constants is compared by `or_`, and not by `in_`, whose list
is written anew for each execution; and by what it is, not by what it is not, for which no index is of use.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Select,
    and_,
    bindparam,
    func,
    insert,
    not_,
    or_,
    select,
    true,
    update,
)

from coordinator.storage.schema import (
    LeaseState,
    SlotState,
    SubmissionState,
    groups,
    leases,
    nodes,
    policies,
    slots,
    steps,
    submissions,
)
from coordinator.storage.standing import is_unproven
from node.protocol.admission import DRIFT, Outcome
from node.protocol.reasons import Reason

MOST_FAILURES = 2
"""After so many a slot is not for nodes that have shown nothing, nor for the one that let it lapse so often."""


def _one_of(column: Column[str], *values: str) -> ColumnElement[bool]:
    return or_(*(column == value for value in values))


def _how_many(*conditions: ColumnElement[bool]) -> Select[Any]:
    return select(func.count()).where(*conditions)


_HEAD = select(func.max(policies.c.version)).scalar_subquery()
_LAST_STEP = select(func.max(steps.c.step)).scalar_subquery()
PROGRESS = select(_HEAD, _LAST_STEP)

NODE_SEEN = (
    update(nodes)
    .where(nodes.c.node == bindparam("of_node"))
    .values(seen_at=bindparam("now"), address=bindparam("from_address"))
    .returning(nodes.c.admitted, nodes.c.rejected_streak, nodes.c.not_before, nodes.c.verified, nodes.c.strikes)
)

_ACTIVE = leases.c.state == LeaseState.ACTIVE
_WITHOUT_VERDICT = (
    _one_of(submissions.c.state, SubmissionState.QUEUED, SubmissionState.VERIFYING),
    submissions.c.outcome.is_(None),
)
"""Not those that wait for a second one: else a node that is caught would keep others from working."""

HELD = _how_many(leases.c.node == bindparam("node"), _ACTIVE)
HELD_AT = _how_many(_ACTIVE, leases.c.node == nodes.c.node, nodes.c.address == bindparam("address"))
HELD_BY_UNPROVEN = _how_many(_ACTIVE, leases.c.node == nodes.c.node, is_unproven())
UNJUDGED = _how_many(submissions.c.node == bindparam("node"), *_WITHOUT_VERDICT)
UNJUDGED_OF_UNPROVEN = _how_many(*_WITHOUT_VERDICT, submissions.c.node == nodes.c.node, is_unproven())

SITUATION = select(
    _HEAD,
    _LAST_STEP,
    select(policies.c.manifest_digest).order_by(policies.c.version.desc()).limit(1).scalar_subquery(),
    HELD.scalar_subquery() + UNJUDGED.scalar_subquery(),
)
"""Where the run is, the newest policy's manifest, and what `node` has not finished."""

LEASE = (
    select(
        leases.c.node,
        leases.c.state,
        leases.c.expires_at,
        leases.c.slot_id,
        slots.c.version,
        slots.c.state.label("slot_state"),
        _HEAD,
        _LAST_STEP,
    )
    .join(slots, slots.c.id == leases.c.slot_id)
    .where(leases.c.lease == bindparam("lease"))
    .with_for_update(of=leases)
)
OVERDUE = (
    select(leases.c.lease, leases.c.node)
    .where(_ACTIVE, or_(leases.c.expires_at <= bindparam("now"), leases.c.expires_at > bindparam("too_late")))
    # One that is being submitted at this moment is in time.
    .with_for_update(skip_locked=True)
)
NEW_LEASE = insert(leases)
LEASE_STATE = update(leases).where(leases.c.lease == bindparam("of_lease")).values(state=bindparam("new_state"))

GROUPS_WAITING = _how_many(groups.c.step.is_(None))
SLOTS_NOW = select(
    _how_many(_one_of(slots.c.state, SlotState.LEASED, SlotState.SUBMITTED, SlotState.ADMITTED)).scalar_subquery(),
    _how_many(slots.c.state == SlotState.OPEN).scalar_subquery(),
    select(func.max(slots.c.number)).where(slots.c.version == bindparam("version")).scalar_subquery(),
)
"""How many are under way, and open, and the last one's number of a version."""

NEW_SLOT = insert(slots).returning(slots.c.id)
SLOT_STATE = update(slots).where(slots.c.id == bindparam("slot")).values(state=bindparam("new_state"))
REOPEN_SLOT = (
    update(slots)
    .where(
        slots.c.id == select(leases.c.slot_id).where(leases.c.lease == bindparam("of_lease")).scalar_subquery(),
        slots.c.state == SlotState.LEASED,
    )
    .values(state=SlotState.OPEN)
)


def _open_slots(*, with_failures: bool) -> Select[Any]:
    """Oldest first; not those in which `node` failed, or which it let lapse twice: an answer may be lost, but a problem
    that it cannot do would take it up for good. Without those in which others failed a few times.
    """
    failed_here = select(submissions.c.slot_id).where(
        submissions.c.node == bindparam("node"),
        or_(submissions.c.outcome == Outcome.REJECTED, submissions.c.recheck == Outcome.REJECTED),
    )
    lapsed_here = _how_many(
        leases.c.slot_id == slots.c.id, leases.c.node == bindparam("node"), leases.c.state == LeaseState.EXPIRED
    )
    # A slot that is open now was let lapse so often, or submitted without being admitted.
    failed = _one_of(leases.c.state, LeaseState.EXPIRED, LeaseState.SUBMITTED)
    failures = _how_many(leases.c.slot_id == slots.c.id, failed).scalar_subquery()
    return (
        select(slots.c.id, slots.c.version, slots.c.number, policies.c.manifest_digest, slots.c.candidate)
        .join(policies, policies.c.version == slots.c.version)
        .where(
            slots.c.state == SlotState.OPEN,
            slots.c.version.in_(bindparam("versions", expanding=True)),
            slots.c.id.not_in(failed_here),
            lapsed_here.scalar_subquery() < MOST_FAILURES,
            true() if with_failures else failures < MOST_FAILURES,
        )
        .order_by(slots.c.id)
        .limit(bindparam("most"))
        .with_for_update(of=slots, skip_locked=True)
    )


OPEN_SLOTS, OPEN_SLOTS_FOR_UNPROVEN = _open_slots(with_failures=True), _open_slots(with_failures=False)

# Honest nodes generate the same bytes for a slot, so a file counts as known only where it is right (it was
# admitted) or was judged or waits (for this slot). Otherwise a copy under another slot would bar its author, and
# a node that was stopped for its earlier slots, its successor.
KNOWN_BODY = select(submissions.c.submission, submissions.c.node).where(
    submissions.c.body == bindparam("body"),
    or_(
        # What a second verdict left undecided may come again: nobody said that it is wrong.
        and_(
            submissions.c.outcome == Outcome.ADMITTED,
            submissions.c.recheck.is_distinct_from(Outcome.INDETERMINATE),
        ),
        and_(
            submissions.c.slot_id == bindparam("slot"),
            or_(
                submissions.c.outcome.is_(None),
                and_(
                    submissions.c.outcome == Outcome.REJECTED,
                    # Whoever signs for two files at once says nothing of either.
                    submissions.c.reason.is_distinct_from(Reason.WRONG_BODY),
                    or_(
                        submissions.c.figure.is_(None),
                        not_(submissions.c.figure.endswith(DRIFT, autoescape=True)),
                    ),
                ),
            ),
        ),
    ),
)
SUBMISSION_OF = select(submissions.c.submission).where(submissions.c.lease == bindparam("lease"))
NEW_SUBMISSION = insert(submissions)
