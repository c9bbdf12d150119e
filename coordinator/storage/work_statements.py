"""The statements of `work`, prepared: building one in SQLAlchemy takes three times as long as running it.

A column is compared with constants by `or_`, since `in_` is expanded at each execution, and never by inequality, which
uses no index.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Boolean,
    Column,
    ColumnElement,
    Integer,
    Select,
    and_,
    bindparam,
    case,
    exists,
    func,
    not_,
    or_,
    select,
    update,
)

from coordinator.storage.counters import UNSETTLED
from coordinator.storage.prepared import Prepared, insert_into
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
"""Failures of a slot after which unproven nodes, and a node that let it lapse so often, do not get it."""


MOST_ENDED = 64
"""Overdue leases that one request ends: after an outage all of them are, and everybody would wait for it."""


def _one_of(column: Column[str], *values: str) -> ColumnElement[bool]:
    return or_(*(column == value for value in values))


def _how_many(*conditions: ColumnElement[bool]) -> Select[Any]:
    return select(func.count()).where(*conditions)


_HEAD = select(func.max(policies.c.version)).scalar_subquery()
_LAST_STEP = select(func.max(steps.c.step)).scalar_subquery()
PROGRESS = Prepared(select(_HEAD, _LAST_STEP))

_OLDEST_HELD = bindparam("oldest_held", type_=Integer)
_IS_BUSY = bindparam("is_busy", type_=Boolean)
_KEEPS_HELD = and_(_IS_BUSY, or_(_OLDEST_HELD.is_(None), nodes.c.held_from < _OLDEST_HELD))
"""Whether a node may have older policies than it says: with work under way it names those that it would begin with."""
_STAYS = and_(_IS_BUSY, nodes.c.address != "")
"""Whether a node counts as where it was before: with what it has under way it would leave room there for other keys."""
_STANDING = (
    nodes.c.admitted,
    nodes.c.rejected_streak,
    nodes.c.not_before,
    nodes.c.verified,
    nodes.c.strikes,
    nodes.c.address,
    nodes.c.place,
)
NODE_SEEN = Prepared(
    update(nodes)
    .where(nodes.c.node == bindparam("of_node"))
    .values(
        seen_at=bindparam("now"),
        address=case((_STAYS, nodes.c.address), else_=bindparam("from_address")),
        place=case((_STAYS, nodes.c.place), else_=bindparam("from_place")),
        held_from=case((_KEEPS_HELD, nodes.c.held_from), else_=_OLDEST_HELD),
    )
    .returning(*_STANDING)
)

IS_ACTIVE = leases.c.state == LeaseState.ACTIVE
IS_WITHOUT_VERDICT = (
    _one_of(submissions.c.state, SubmissionState.QUEUED, SubmissionState.VERIFYING),
    submissions.c.outcome.is_(None),
)
"""Rechecks do not count: a rejected node's would take capacity from others."""

_ENDS = select(leases.c.expires_at).where(IS_ACTIVE)
_IS_OVERDUE = or_(leases.c.expires_at <= bindparam("now"), leases.c.expires_at > bindparam("too_late"))

_HELD = _how_many(leases.c.node == bindparam("node"), IS_ACTIVE)
HELD_AT = Prepared(_how_many(IS_ACTIVE, leases.c.node == nodes.c.node, nodes.c.address == bindparam("address")))
_UNJUDGED = _how_many(submissions.c.node == bindparam("node"), *IS_WITHOUT_VERDICT)
_THERE = nodes.c.place == bindparam("place")
HELD, UNJUDGED = Prepared(_HELD), Prepared(_UNJUDGED)

SITUATION = Prepared(
    select(
        _HEAD,
        _LAST_STEP,
        select(policies.c.manifest_digest).order_by(policies.c.version.desc()).limit(1).scalar_subquery(),
        _HELD.scalar_subquery() + _UNJUDGED.scalar_subquery(),
        # By the ends of an index: asked whether any lease is over, PostgreSQL may read all of them.
        or_(
            _ENDS.order_by(leases.c.expires_at).limit(1).scalar_subquery() <= bindparam("now"),
            _ENDS.order_by(leases.c.expires_at.desc()).limit(1).scalar_subquery() > bindparam("too_late"),
        ),
    )
)
"""Newest policy, last step, the newest policy's manifest, how many leases and submissions without a verdict `node` has,
and whether any lease is overdue: None, too, where none is active."""

_LEASE = (
    select(
        leases.c.node,
        leases.c.state,
        leases.c.expires_at,
        leases.c.slot_id,
        slots.c.version,
        slots.c.state.label("slot_state"),
        _HEAD,
        _LAST_STEP,
        policies.c.manifest_digest,
        slots.c.number,
        slots.c.candidate,
    )
    .join(slots, slots.c.id == leases.c.slot_id)
    .join(policies, policies.c.version == slots.c.version)
    .where(leases.c.lease == bindparam("lease"))
)
LEASE, LOCKED_LEASE = Prepared(_LEASE), Prepared(_LEASE.with_for_update(of=leases))
OVERDUE = Prepared(
    select(leases.c.lease, leases.c.node, leases.c.expires_at)
    .where(IS_ACTIVE, _IS_OVERDUE)
    .limit(MOST_ENDED)
    # A lease whose submission is being committed is in time.
    .with_for_update(skip_locked=True)
)
FREE = Prepared(
    select(leases.c.lease)
    .join(nodes, nodes.c.node == leases.c.node)
    .where(leases.c.lease == bindparam("lease"), IS_ACTIVE)
    .with_for_update(key_share=True, skip_locked=True)
)
"""An active lease that no other transaction has locked, nor its node."""
OWN_NODE = Prepared(select(*_STANDING).where(nodes.c.node == bindparam("node")).with_for_update(key_share=True))
ACTIVE_OF = select(leases.c.lease, leases.c.node).where(
    IS_ACTIVE, leases.c.slot_id.in_(bindparam("ids", expanding=True))
)
NEW_LEASE = Prepared(
    insert_into(leases, "lease", "node", "state", "issued_at", "expires_at").values(
        slot_id=select(slots.c.id)
        .where(slots.c.version == bindparam("of_version"), slots.c.number == bindparam("of_number"))
        .scalar_subquery()
    )
)
"""By the slot's number, so that nobody waits for the id of a new one."""
END_LEASE = Prepared(
    update(leases)
    .where(leases.c.lease == bindparam("of_lease"), IS_ACTIVE)
    .values(state=bindparam("new_state"), ended_at=bindparam("now"))
)
LEASE_STATE = Prepared(
    update(leases).where(leases.c.lease == bindparam("of_lease")).values(state=bindparam("new_state"))
)

GROUPS_WAITING = Prepared(_how_many(groups.c.step.is_(None)))
SLOTS_NOW = Prepared(
    select(
        UNSETTLED,
        _how_many(slots.c.state == SlotState.OPEN).scalar_subquery(),
        select(func.max(slots.c.number)).where(slots.c.version == bindparam("version")).scalar_subquery(),
    )
)
"""How many slots are in flight or open, how many are open, and the highest number of a version."""

NEW_SLOT = Prepared(
    insert_into(slots, "version", "number", "state", "opened_at", "candidate", "environment", "problem")
)
SLOT_STATE = Prepared(update(slots).where(slots.c.id == bindparam("slot")).values(state=bindparam("new_state")))
REOPEN_SLOT = Prepared(
    update(slots)
    .where(
        slots.c.id == select(leases.c.slot_id).where(leases.c.lease == bindparam("of_lease")).scalar_subquery(),
        slots.c.state == SlotState.LEASED,
    )
    .values(state=SlotState.OPEN)
)


_ME = nodes.alias()
_PROVEN_OF_LATE = (nodes.c.seen_at > bindparam("seen_since"), not_(is_unproven()))
_VERIFIED = select(_ME.c.verified).where(_ME.c.node == bindparam("node")).scalar_subquery()
_IS_SENIOR = (
    2 * _how_many(*_PROVEN_OF_LATE, nodes.c.verified > _VERIFIED).scalar_subquery()
    <= _how_many(*_PROVEN_OF_LATE).scalar_subquery()
)


# An end that is farther ahead is one of before this machine's clock was set back: nobody waits for that time to come.
_ENDED_LATELY = and_(leases.c.ended_at > bindparam("lately"), leases.c.ended_at <= bindparam("ahead"))


def _open_slots(*, with_failures: bool) -> Select[Any]:
    """Select open slots, oldest first, that `node` neither failed nor let lapse twice.

    One lapse may be a lost reply; a problem that the node cannot solve must not occupy it for good. What a node of
    `place` gave up since `lately` is for others first; what has failed MOST_FAILURES times, for the half of the proven
    nodes seen since `seen_since` with the most slots verified, or not at all without `with_failures`.
    """
    is_failure = or_(submissions.c.outcome == Outcome.REJECTED, submissions.c.recheck == Outcome.REJECTED)
    # A comparison that no index serves: by slot there are a few, and by node all that it ever failed.
    failed_here = exists().where(
        submissions.c.slot_id == slots.c.id, case((is_failure, submissions.c.node)) == bindparam("node")
    )
    lapsed_here = _how_many(
        leases.c.slot_id == slots.c.id, leases.c.node == bindparam("node"), leases.c.state == LeaseState.EXPIRED
    )
    given_up = select(leases.c.slot_id).where(
        _ENDED_LATELY,
        leases.c.node == nodes.c.node,
        or_(nodes.c.node == bindparam("node"), and_(_THERE, nodes.c.place != "")),
    )
    # Of an open slot, every lease but an active one is a failure.
    ended = _one_of(leases.c.state, *(state for state in LeaseState if state is not LeaseState.ACTIVE))
    failures = _how_many(leases.c.slot_id == slots.c.id, ended).scalar_subquery()
    ended_lately = _how_many(leases.c.slot_id == slots.c.id, _ENDED_LATELY).scalar_subquery()
    return (
        select(slots.c.id, slots.c.version, slots.c.number, policies.c.manifest_digest, slots.c.candidate)
        .join(policies, policies.c.version == slots.c.version)
        .where(
            slots.c.state == SlotState.OPEN,
            slots.c.version.in_(bindparam("versions", expanding=True)),
            not_(failed_here),
            slots.c.id.not_in(given_up),
            lapsed_here.scalar_subquery() < MOST_FAILURES,
            or_(failures < MOST_FAILURES, ended_lately == 0, _IS_SENIOR) if with_failures else failures < MOST_FAILURES,
        )
        .order_by(slots.c.id)
        .limit(bindparam("most"))
        .with_for_update(of=slots, skip_locked=True)
    )


_ALL, _FOR_UNPROVEN = _open_slots(with_failures=True), _open_slots(with_failures=False)
OPEN_SLOTS, OPEN_SLOTS_FOR_UNPROVEN = Prepared(_ALL), Prepared(_FOR_UNPROVEN)
_HAS_ENVIRONMENT = slots.c.environment.not_in(bindparam("lacks", expanding=True))
OPEN_SLOTS_IT_HAS = Prepared(_ALL.where(_HAS_ENVIRONMENT))
OPEN_SLOTS_IT_HAS_FOR_UNPROVEN = Prepared(_FOR_UNPROVEN.where(_HAS_ENVIRONMENT))
"""As the former, without slots of the environments `lacks`."""

_SLOT_OF_LEASE = select(leases.c.slot_id).where(leases.c.lease == bindparam("lease")).scalar_subquery()
# Honest nodes generate the same bytes for a slot, so a file is a duplicate only if it was admitted anywhere, or was
# rejected or is queued for this slot. Otherwise a copy submitted for another slot would block its author, and a node
# rejected for drift would block its successor.
KNOWN_BODY = Prepared(
    select(submissions.c.submission, submissions.c.node).where(
        submissions.c.body == bindparam("body"),
        or_(
            # An indeterminate second verdict does not say that the file is wrong.
            and_(
                submissions.c.outcome == Outcome.ADMITTED,
                submissions.c.recheck.is_distinct_from(Outcome.INDETERMINATE),
            ),
            and_(
                submissions.c.slot_id == _SLOT_OF_LEASE,
                or_(
                    submissions.c.outcome.is_(None),
                    and_(
                        submissions.c.outcome == Outcome.REJECTED,
                        # The body differed from the signed digest, so it was not judged.
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
)
SUBMISSION_OF = Prepared(select(submissions.c.submission).where(submissions.c.lease == bindparam("lease")))
NEW_SUBMISSION = Prepared(
    insert_into(
        submissions,
        "submission",
        "lease",
        "slot_id",
        "node",
        "request",
        "envelope",
        "body",
        "body_bytes",
        "received_at",
        "state",
        "attempts",
        "draw",
    )
)
