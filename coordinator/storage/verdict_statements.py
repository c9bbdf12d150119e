"""The statements of `verdicts` that each verdict executes, prepared as those of `work_statements`."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import ColumnElement, Select, and_, bindparam, not_, or_, select, update

from coordinator.storage import standing
from coordinator.storage.prepared import Prepared, insert_into
from coordinator.storage.schema import SubmissionState, groups, nodes, policies, slots, submissions


def is_claimed_as(submission: Any, verifier: Any, attempts: Any) -> ColumnElement[bool]:
    """Return the condition that a submission is claimed by `verifier` in its attempt number `attempts`."""
    return and_(
        submissions.c.submission == submission,
        submissions.c.state == SubmissionState.VERIFYING,
        submissions.c.verifier == verifier,
        submissions.c.attempts == attempts,
    )


CLAIMABLE: Final[Select[Any]] = (
    select(
        submissions.c.submission,
        submissions.c.node,
        submissions.c.request,
        submissions.c.body,
        slots.c.version,
        slots.c.number.label("slot"),
        slots.c.id.label("slot_id"),
        slots.c.candidate,
        policies.c.manifest_digest,
        submissions.c.attempts,
        submissions.c.recheck,
        submissions.c.recheck_by,
        submissions.c.draw,
        submissions.c.outcome,
        submissions.c.spot,
        nodes.c.verified,
        nodes.c.strikes,
    )
    .join(slots, slots.c.id == submissions.c.slot_id)
    .join(policies, policies.c.version == slots.c.version)
    .join(nodes, nodes.c.node == submissions.c.node)
    .where(
        or_(
            submissions.c.state == SubmissionState.QUEUED,
            and_(
                submissions.c.state == SubmissionState.VERIFYING,
                or_(
                    submissions.c.claimed_until <= bindparam("now"),
                    # Far longer than any claim: made while this machine's clock was ahead.
                    submissions.c.claimed_until > bindparam("farthest"),
                    and_(
                        submissions.c.verifier == bindparam("claimer"),
                        submissions.c.attempts < bindparam("most_attempts"),
                    ),
                ),
            ),
        )
    )
    .order_by(
        not_(standing.blocks_training()),
        submissions.c.recheck.is_(None),
        slots.c.version,
        submissions.c.received_at,
    )
    .limit(bindparam("most"))
    .with_for_update(of=submissions, skip_locked=True)
)
CLAIM: Final = (
    update(submissions)
    .where(submissions.c.submission.in_(bindparam("taken", expanding=True)))
    .values(
        state=SubmissionState.VERIFYING,
        verifier=bindparam("claimer"),
        claimed_until=bindparam("until"),
        attempts=submissions.c.attempts + 1,
    )
)
# Locked, for no other verifier to claim it meanwhile.
JUDGED: Final = Prepared(
    select(
        submissions.c.outcome,
        submissions.c.recheck,
        submissions.c.received_at,
        submissions.c.body,
        is_claimed_as(bindparam("name"), bindparam("claimer"), bindparam("attempt")).label("held"),
    )
    .where(submissions.c.submission == bindparam("name"))
    .with_for_update()
)
UPDATE_SUBMISSION: Final = update(submissions).where(submissions.c.submission == bindparam("name"))
DECIDED: Final = ("outcome", "reason", "detail", "figure", "tokens", "log_index", "decided_at", "spot", "evidence")
"""Columns that `DECIDE` sets, each to the parameter of its name after `new_`."""
DECIDE: Final = Prepared(
    UPDATE_SUBMISSION.values(state=SubmissionState.DONE).values(
        {column: bindparam(f"new_{column}") for column in DECIDED}
    )
)
# By itself, since SQLite writes an index anew for each column that a statement names, even to the value it has.
SET_BODY: Final = Prepared(UPDATE_SUBMISSION.values(body=bindparam("new_body")))
UPDATE_SLOT: Final = Prepared(update(slots).where(slots.c.id == bindparam("of_slot")).values(state=bindparam("new")))
ADD_GROUP: Final = Prepared(insert_into(groups, "slot_id", "submission", "blob", "reward_mean", "signal"))
DRIFT: Final = Prepared(
    select(nodes.c.drift).where(nodes.c.node == bindparam("of_node")).with_for_update(key_share=True)
)
SET_DRIFT: Final = Prepared(update(nodes).where(nodes.c.node == bindparam("of_node")).values(drift=bindparam("new")))
