"""The verifiers' queue, and what a verdict changes, in one transaction with its log entry."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from sqlalchemy import Connection, and_, insert, or_, select, update

from coordinator.storage import log
from coordinator.storage.schema import SlotState, SubmissionState, groups, nodes, policies, slots, submissions
from coordinator.storage.work import make_wait
from node.protocol.admission import Figures, Finding, Outcome, judge_drift
from node.protocol.evidence import Drift, Totals, follow
from node.protocol.messages import VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import LimitsSpec, RunSpec
from shardcast.wire import decode, encode

MAX_ATTEMPTS = 3
"""How often a verification that could not decide is tried before the slot is given out anew."""

MAX_DRIFT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Claimed:
    """A submission that this verifier is to judge."""

    submission: str
    node: str
    request: str
    body: str
    version: int
    slot: int
    slot_id: int
    manifest_digest: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict as it is stored; `group` is the admitted group's blob and its mean reward."""

    outcome: Outcome
    reason: Reason | None
    detail: str
    tokens: int
    finding: Finding | None = None
    figures: Figures | None = None
    totals: Totals | None = None
    rewards: tuple[float, ...] | None = None
    group: str | None = None


def claim(connection: Connection, *, verifier: str, now: float, seconds: float, most: int = 1) -> list[Claimed]:
    """Take the oldest submissions that nobody works on, or that this verifier left when it died: at most `most`.

    They are this verifier's for `seconds` each.
    """
    free = or_(
        submissions.c.state == SubmissionState.QUEUED,
        and_(
            submissions.c.state == SubmissionState.VERIFYING,
            or_(submissions.c.claimed_until <= now, submissions.c.verifier == verifier),
        ),
    )
    query = (
        select(
            submissions.c.submission,
            submissions.c.node,
            submissions.c.request,
            submissions.c.body,
            slots.c.version,
            slots.c.number.label("slot"),
            slots.c.id.label("slot_id"),
            policies.c.manifest_digest,
            submissions.c.attempts,
        )
        .join(slots, slots.c.id == submissions.c.slot_id)
        .join(policies, policies.c.version == slots.c.version)
        .where(free)
        .order_by(submissions.c.received_at)
        .limit(most)
        .with_for_update(of=submissions, skip_locked=True)
    )
    taken = [Claimed(**row._asdict()) for row in connection.execute(query)]
    connection.execute(
        update(submissions)
        .where(submissions.c.submission.in_([one.submission for one in taken]))
        .values(
            state=SubmissionState.VERIFYING,
            verifier=verifier,
            claimed_until=now + seconds * len(taken),
            attempts=submissions.c.attempts + 1,
        )
    )
    return taken


def defer(connection: Connection, claimed: Claimed, *, until: float) -> None:
    """Leave a claimed submission alone until then, for any verifier to claim again; counts as no attempt."""
    held = and_(submissions.c.submission == claimed.submission, submissions.c.state == SubmissionState.VERIFYING)
    connection.execute(
        update(submissions).where(held).values(verifier=None, claimed_until=until, attempts=claimed.attempts)
    )


def record(connection: Connection, claimed: Claimed, decision: Decision, *, spec: RunSpec, now: float) -> bool:
    """Store a decision once; False if another verifier was faster. An undecided one may be queued again."""
    state = select(submissions.c.state).where(submissions.c.submission == claimed.submission)
    if connection.execute(state).scalar_one() != SubmissionState.VERIFYING:
        return False
    if decision.outcome is Outcome.INDETERMINATE and claimed.attempts + 1 < MAX_ATTEMPTS:
        _update_submission(connection, claimed, state=SubmissionState.QUEUED, verifier=None)
        return True
    decision = _after_drift(connection, claimed, decision, limits=spec.limits)
    index = log.append(connection, _entry(claimed, decision, now=now))
    _update_submission(
        connection,
        claimed,
        state=SubmissionState.DONE,
        outcome=decision.outcome,
        reason=decision.reason,
        detail=decision.detail,
        figure=decision.finding.figure if decision.finding is not None else None,
        tokens=decision.tokens,
        log_index=index,
        decided_at=now,
    )
    admitted = decision.outcome is Outcome.ADMITTED
    _update_slot(connection, claimed, admitted=admitted)
    if admitted:
        _store_group(connection, claimed, decision)
    _update_standing(connection, claimed.node, decision, spec=spec, now=now)
    return True


def _after_drift(connection: Connection, claimed: Claimed, decision: Decision, *, limits: LimitsSpec) -> Decision:
    """The decision, once what the node's slots show together is known: in the order of the log, as nobody else can.

    A slot that is rejected for what it shows itself does not count: one bad slot must not cost the good ones after it.
    """
    if decision.totals is None or decision.outcome is not Outcome.ADMITTED:
        return decision
    node = nodes.c.node == claimed.node
    held = connection.execute(select(nodes.c.drift).where(node).with_for_update()).scalar_one()
    drift = Drift() if held is None else decode(Drift, held, max_bytes=MAX_DRIFT_BYTES)
    drift = follow(drift, decision.totals, limits=limits)
    connection.execute(update(nodes).where(node).values(drift=encode(drift)))
    finding = judge_drift(drift, limits=limits)
    if finding is None:
        return decision
    return replace(
        decision,
        outcome=Outcome.REJECTED,
        reason=finding.reason,
        finding=finding,
        detail=f"The node's slots: {finding.figure} is {finding.value:.6g}, the limit is {finding.limit:.6g}.",
        rewards=None,
        group=None,
    )


def _entry(claimed: Claimed, decision: Decision, *, now: float) -> VerdictEntry:
    return VerdictEntry(
        submission=claimed.submission,
        node=claimed.node,
        version=claimed.version,
        manifest_digest=claimed.manifest_digest,
        slot=claimed.slot,
        request=claimed.request,
        body=claimed.body,
        outcome=decision.outcome,
        reason=decision.reason,
        finding=decision.finding,
        detail=decision.detail,
        figures=decision.figures,
        totals=decision.totals,
        rewards=decision.rewards,
        tokens=decision.tokens,
        decided_at=int(now),
    )


def _update_submission(connection: Connection, claimed: Claimed, **values: object) -> None:
    row = update(submissions).where(submissions.c.submission == claimed.submission)
    connection.execute(row.values(**values))


def _update_slot(connection: Connection, claimed: Claimed, *, admitted: bool) -> None:
    state = SlotState.ADMITTED if admitted else SlotState.OPEN
    connection.execute(update(slots).where(slots.c.id == claimed.slot_id).values(state=state))


def _store_group(connection: Connection, claimed: Claimed, decision: Decision) -> None:
    rewards = decision.rewards or ()
    connection.execute(
        insert(groups).values(
            slot_id=claimed.slot_id,
            submission=claimed.submission,
            blob=decision.group,
            reward_mean=sum(rewards) / len(rewards),
        )
    )


def _update_standing(connection: Connection, node: str, decision: Decision, *, spec: RunSpec, now: float) -> None:
    """Credit an admitted group; make a rejected node wait."""
    row = update(nodes).where(nodes.c.node == node)
    if decision.outcome is Outcome.ADMITTED:
        values = {
            "admitted": nodes.c.admitted + 1,
            "tokens": nodes.c.tokens + decision.tokens,
            "rejected_streak": 0,
        }
        connection.execute(row.values(values))
    elif decision.outcome is Outcome.REJECTED:
        connection.execute(row.values(rejected=nodes.c.rejected + 1))
        make_wait(connection, node, batch=spec.batch, now=now)


def clock() -> float:
    """Seconds since 1970; the one place where the operator's processes read the time."""
    return time.time()
