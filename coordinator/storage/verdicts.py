"""The verifiers' queue, and the effects of a verdict, in one transaction with its log entry."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from msgspec import UNSET
from msgspec.structs import asdict, replace
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, false, or_, select, update

from coordinator.storage import locks, log, pools, stakes, standing, tallies
from coordinator.storage import verdict_statements as statements
from coordinator.storage.counters import SETTLED, count_final, count_rejection
from coordinator.storage.prepared import Prepared, run_all
from coordinator.storage.progress import progress
from coordinator.storage.schema import RECHECK_DUE, SlotState, SubmissionState, groups, submissions
from coordinator.storage.tallies import VerdictKind
from node.protocol.admission import Outcome, Verdict, has_signal, judge_drift
from node.protocol.evidence import Drift, follow
from node.protocol.messages import VerdictEntry
from node.protocol.run import LimitsSpec, PoolsSpec, RunSpec
from node.protocol.standing import Standing
from shardcast.wire import decode, encode

MAX_ATTEMPTS = 3
"""Attempts to verify a submission before it is indeterminate."""

MAX_CLAIMS = 2 * MAX_ATTEMPTS
"""Claims of a submission without a verdict before it is given up: it may be what ends or hangs its verifiers."""

MAX_DRIFT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class QueueItem:
    """A submission claimed by `verifier`; `full`: measure all rows. A `recheck` is retried until `recheck_by`.

    `attempts` are those before this claim. A `rebuild` has its verdict, and only its group is made again, from the rows
    that were measured then: all, or the row `spot`.
    """

    submission: str
    node: str
    request: str
    body: str
    version: int
    slot: int
    slot_id: int
    manifest_digest: str
    attempts: int
    verifier: str
    full: bool = True
    recheck: bool = False
    recheck_by: float = 0.0
    candidate: int | None = None
    rebuild: bool = False
    spot: int | None = None

    @property
    def is_hopeless(self) -> bool:
        """Whether it has used up its claims, and ends as indeterminate without being measured again."""
        return self.attempts >= MAX_CLAIMS


def claim(
    connection: Connection,
    *,
    verifier: str,
    spec: RunSpec,
    now: float,
    seconds: float,
    most: int = 1,
) -> list[QueueItem]:
    """Claim at most `most` submissions of one version: queued, expired, or left by an earlier process of this verifier.

    Claims last `seconds`, unless they are renewed. Rechecks that training waits for come first, then others, then the
    oldest version, which is the first that training cannot use any more, then by arrival. So verifiers load a policy
    once for all that waits under it, and nothing waits for a version that is older. One that was claimed MAX_ATTEMPTS
    times is claimed alone, and before that with a quarter of the others each time: where it ends its verifier, it uses
    up few claims of others. From then on it also waits until
    its claim ends, whoever has it: a verifier that ends within a second of each start would give it up within seconds.
    """
    over = progress(connection).is_over(spec)
    asked = {"now": now, "farthest": now + 2 * seconds, "claimer": verifier, "most_attempts": MAX_ATTEMPTS}
    rows = connection.execute(statements.CLAIMABLE, asked | {"most": most}).all()
    rows = rows[: max(1, most >> 2 * max((row.attempts for row in rows), default=0))]
    taken = [
        _claimed(connection, row, verifier=verifier, spec=spec, over=over)
        for row in takewhile(lambda row: row is rows[0] or _goes_with(row, rows[0]), rows)
    ]
    if taken:
        names = [one.submission for one in taken]
        connection.execute(statements.CLAIM, {"taken": names, "claimer": verifier, "until": now + seconds})
    return taken


def _goes_with(row: Row[Any], first: Row[Any]) -> bool:
    most: int = max(row.attempts, first.attempts)
    return bool(row.version == first.version) and most < MAX_ATTEMPTS


def _claimed(connection: Connection, row: Row[Any], *, verifier: str, spec: RunSpec, over: bool) -> QueueItem:
    """Convert a row of `statements.CLAIMABLE`; once the run is `over`, all rows are measured."""
    values = row._asdict()
    recheck = values.pop("recheck") == RECHECK_DUE
    rebuild = values.pop("outcome") is not None and not recheck
    held = Standing(verified=values.pop("verified"), strikes=values.pop("strikes"))
    staked = stakes.held(connection, row.node) if spec.standing.stake else 0
    full = standing.is_measured_in_full(held, draw=values.pop("draw"), staked=staked, rules=spec.standing)
    values["recheck_by"] = values["recheck_by"] or 0.0
    full = row.spot is None if rebuild else full or recheck or over
    return QueueItem(**values, verifier=verifier, full=full, recheck=recheck, rebuild=rebuild)


def is_held(claimed: QueueItem) -> ColumnElement[bool]:
    """Return the condition that the submission is still at the verifier that claimed it, by this very claim."""
    return statements.is_claimed_as(claimed.submission, claimed.verifier, claimed.attempts + 1)


def renew(connection: Connection, claimed: Sequence[QueueItem], *, until: float) -> None:
    """Make these claims last until `until`; those that another verifier has by now stay as they are.

    So do those whose verdict is being recorded, whose rows would be waited for in another order.
    """
    held = select(submissions.c.submission).where(or_(false(), *map(is_held, claimed)))
    free = held.with_for_update(key_share=True, skip_locked=True)
    names = connection.execute(free).scalars().all()
    connection.execute(update(submissions).where(submissions.c.submission.in_(names)).values(claimed_until=until))


def defer(connection: Connection, claimed: QueueItem, *, until: float) -> None:
    """Release a claimed submission, for any verifier to claim after `until`; does not count as an attempt.

    One that was released already waits until then as well; one that was claimed again meanwhile stays claimed.
    """
    released = and_(
        submissions.c.submission == claimed.submission,
        submissions.c.state == SubmissionState.VERIFYING,
        submissions.c.verifier.is_(None),
        submissions.c.attempts == claimed.attempts,
    )
    held = or_(is_held(claimed), released)
    connection.execute(
        update(submissions).where(held).values(verifier=None, claimed_until=until, attempts=claimed.attempts)
    )


def record(
    connection: Connection,
    claimed: QueueItem,
    verdict: Verdict,
    *,
    spec: RunSpec,
    now: float,
    group: str | None = None,
    evidence: str | None = None,
) -> bool:
    """Store a verdict, or requeue an indeterminate one; return False if it comes too late to matter.

    The first verdict that decides counts, whoever has the claim by now; one that does not counts from the claim's
    holder alone. `group` and `evidence` name the blobs of the admitted group and of the measurements
    (`coordinator.verifier.evidence`).
    """
    locks.deciding(connection)
    claim_ = {"name": claimed.submission, "claimer": claimed.verifier, "attempt": claimed.attempts + 1}
    ((outcome, recheck, received_at, body, is_held_still),) = statements.JUDGED.rows(connection, claim_)
    # A late first verdict may find its submission waiting for the second, or its group for being rebuilt.
    if (recheck != RECHECK_DUE) if claimed.recheck else (outcome is not None):
        return False
    if not _settles(connection, claimed, verdict, spec=spec):
        if not is_held_still:
            return False
        if verdict.outcome is not Outcome.INDETERMINATE or _has_attempts_left(claimed, now=now):
            _update_submission(connection, claimed, state=SubmissionState.QUEUED, verifier=None)
            return True
    if claimed.recheck:
        _record_recheck(connection, claimed, verdict, spec=spec, now=now, evidence=evidence)
    else:
        if claimed.body != body:  # the true digest, where another was signed
            statements.SET_BODY.run(connection, {"name": claimed.submission, "new_body": claimed.body})
        verdict = _after_drift(connection, claimed, verdict, limits=spec.limits)
        waited = now - received_at
        _record_first(
            connection, claimed, verdict, spec=spec, now=now, waited_seconds=waited, group=group, evidence=evidence
        )
    if verdict.outcome is Outcome.REJECTED:
        standing.penalise(connection, claimed.node, submission=claimed.submission, spec=spec, now=now)
    return True


def _settles(connection: Connection, claimed: QueueItem, verdict: Verdict, *, spec: RunSpec) -> bool:
    """Return whether a verdict decides: not `indeterminate`, nor of one row where all count now (node rejected, run
    over).
    """
    if verdict.outcome is Outcome.INDETERMINATE:
        return False
    if verdict.spot is None:
        return True
    held = standing.standing_of(connection, claimed.node)
    return held.full_rate(spec.standing) < 1.0 and not progress(connection).is_over(spec)


def _has_attempts_left(claimed: QueueItem, *, now: float) -> bool:
    return claimed.attempts + 1 < MAX_ATTEMPTS and (not claimed.recheck or now < claimed.recheck_by)


def _record_first(
    connection: Connection,
    claimed: QueueItem,
    verdict: Verdict,
    *,
    spec: RunSpec,
    now: float,
    waited_seconds: float,
    group: str | None,
    evidence: str | None,
) -> None:
    index = log.append(connection, _entry(claimed, verdict, now=now))
    decided = {
        "outcome": verdict.outcome.value,
        "reason": None if verdict.reason is None else verdict.reason.value,
        "detail": verdict.detail,
        "figure": verdict.finding.figure if verdict.finding is not None else None,
        "tokens": verdict.tokens,
        "log_index": index,
        "decided_at": now,
        "spot": verdict.spot,
        "evidence": evidence,
    }
    values = {f"new_{column}": decided[column] for column in statements.DECIDED}
    rewards, is_full = verdict.rewards or (), verdict.spot is None
    state = _state_after(verdict, spec=spec)
    kind = VerdictKind.FULL if is_full else VerdictKind.SPOT
    counting = tallies.counting(connection, kind, verdict, waited_seconds=waited_seconds, now=now)
    changes: list[tuple[Prepared, dict[str, Any]]] = [
        (statements.DECIDE, {"name": claimed.submission, **values}),
        (statements.UPDATE_SLOT, {"of_slot": claimed.slot_id, "new": state.value}),
    ]
    if verdict.outcome is Outcome.ADMITTED:
        if isinstance(spec.batch.pools, PoolsSpec):
            pools.note_group(connection, claimed.slot_id, rewards, head=progress(connection).head)
        if state is SlotState.ADMITTED:
            row = {"slot_id": claimed.slot_id, "submission": claimed.submission, "blob": group}
            mean = sum(rewards) / len(rewards)
            changes.append((statements.ADD_GROUP, row | {"reward_mean": mean, "signal": has_signal(rewards)}))
        changes.append(standing.admission(connection, claimed.node, full=is_full, tokens=verdict.tokens, spec=spec))
        run_all(connection, [*changes, counting])
    else:
        run_all(connection, [*changes, counting])
        if verdict.outcome is Outcome.REJECTED:
            count_rejection(connection, claimed.node, verdict.reason)
        standing.apply_refusal(connection, claimed.node, verdict.outcome, full=is_full, spec=spec, now=now)
    if state in SETTLED:
        count_final(connection, state)


def _state_after(verdict: Verdict, *, spec: RunSpec) -> SlotState:
    """Return what a first verdict makes of its slot."""
    if verdict.outcome is not Outcome.ADMITTED:
        return SlotState.OPEN
    sets_aside = spec.batch.only_signal and not has_signal(verdict.rewards or ())
    return SlotState.SET_ASIDE if sets_aside else SlotState.ADMITTED


def _record_recheck(
    connection: Connection,
    claimed: QueueItem,
    verdict: Verdict,
    *,
    spec: RunSpec,
    now: float,
    evidence: str | None,
) -> None:
    """Record a second verdict. If it does not confirm the first, drop the group unless a step has used it."""
    # A verdict that could not read the file has counted no tokens.
    tokens = select(submissions.c.tokens).where(submissions.c.submission == claimed.submission)
    verdict = replace(verdict, tokens=connection.execute(tokens).scalar_one())
    index = log.append(connection, _entry(claimed, verdict, now=now))
    tallies.count_verdict(connection, VerdictKind.SECOND, verdict, waited_seconds=0.0, now=now)
    changed = {"state": SubmissionState.DONE, "recheck": verdict.outcome, "recheck_index": index, "recheck_by": now}
    _update_submission(connection, claimed, **changed, **({"evidence": evidence} if evidence else {}))
    if verdict.outcome is Outcome.ADMITTED:
        return
    unused = delete(groups).where(groups.c.slot_id == claimed.slot_id, groups.c.step.is_(None))
    if connection.execute(unused).rowcount:
        stale = claimed.version < progress(connection).floor(spec.batch)
        _update_slot(connection, claimed, SlotState.STALE if stale else SlotState.OPEN)
    standing.revoke_admission(connection, claimed.node, verdict.outcome, tokens=verdict.tokens, spec=spec, now=now)


def _after_drift(connection: Connection, claimed: QueueItem, verdict: Verdict, *, limits: LimitsSpec) -> Verdict:
    """Add the slot to its node's drift, in log order, and return the verdict, rejected if drift is over its limit.

    A slot rejected by itself does not count, so that it does not affect the good ones after it.
    """
    if verdict.totals is None or verdict.outcome is not Outcome.ADMITTED:
        return verdict
    held = statements.DRIFT.scalar(connection, {"of_node": claimed.node})
    drift = Drift() if held is None else decode(Drift, bytes(held), max_bytes=MAX_DRIFT_BYTES)
    drift = follow(drift, verdict.totals, limits=limits)
    statements.SET_DRIFT.run(connection, {"of_node": claimed.node, "new": encode(drift)})
    finding = judge_drift(drift, limits=limits)
    if finding is None:
        return verdict
    return replace(
        verdict,
        outcome=Outcome.REJECTED,
        reason=finding.reason,
        finding=finding,
        detail=finding.sentence,
        rewards=None,
    )


def _entry(claimed: QueueItem, verdict: Verdict, *, now: float) -> VerdictEntry:
    return VerdictEntry(
        submission=claimed.submission,
        node=claimed.node,
        version=claimed.version,
        manifest_digest=claimed.manifest_digest,
        slot=claimed.slot,
        request=claimed.request,
        body=claimed.body,
        decided_at=int(now),
        recheck=claimed.recheck,
        candidate=UNSET if claimed.candidate is None else claimed.candidate,
        **asdict(verdict),
    )


def _update_submission(connection: Connection, claimed: QueueItem, **values: object) -> None:
    connection.execute(statements.UPDATE_SUBMISSION, {"name": claimed.submission, **values})


def _update_slot(connection: Connection, claimed: QueueItem, state: SlotState) -> None:
    statements.UPDATE_SLOT.run(connection, {"of_slot": claimed.slot_id, "new": state.value})
    if state in SETTLED:
        count_final(connection, state)


def clock() -> float:
    """Return the time in Unix seconds; the operator's processes read it here only."""
    return time.time()
