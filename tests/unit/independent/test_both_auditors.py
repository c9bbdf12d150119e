"""Two auditors, one of which was written from docs/protocol.md alone, read the same logs.

What would break for whom: where the page leaves open what an auditor checks, one of two honest auditors would call an
honest operator a liar, or overlook one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from independent.audit import LogAudit
from independent.messages import RUN_SPEC
from independent.values import decode as decode_value
from logged import (
    FOUND,
    HONEST_TOTALS,
    RUN,
    SHIFTED,
    SPEC,
    TOO_MUCH,
    WRONG,
    ZERO,
    admitted,
    batch,
    drifting,
    policy,
    rejected,
    replace,
    submission,
    together,
    unmeasured,
)
from msgspec import UNSET

from node.audit.leaves import read_entries
from node.audit.log import read_log
from node.protocol.admission import Finding, Outcome
from node.protocol.evidence import Total, Totals
from node.protocol.messages import BatchEntry, Gap, LogEntry, MissedSlot, PolicyEntry, RunEntry, VerdictEntry
from node.protocol.pools import first_candidate
from node.protocol.reasons import Reason
from node.protocol.run import EnvironmentSpec, PoolsSpec, ProblemsSpec, RunSpec, StandingSpec
from node.protocol.slots import slot_problem
from shardcast.wire import encode

MUTATIONS = 25
TRUSTING = replace(
    SPEC,
    standing=StandingSpec(probation=1, full_rate_floor=0.01, vesting=1, ban_after=2),
    batch=replace(SPEC.batch, groups_per_step=2, max_leases_per_node=2, only_signal=True),
)
POOLED = replace(
    SPEC,
    environments=(EnvironmentSpec(name="arithmetic", problems=ProblemsSpec(count=4)), EnvironmentSpec(name="reverse")),
    batch=replace(SPEC.batch, pools=PoolsSpec(easy=1, normal=1, hard=1, easy_from=0.5, hard_to=0.1)),
)


def rules(spec: RunSpec) -> RunEntry:
    return RunEntry(run_id=RUN, spec_digest=spec.digest)


def plain_log() -> list[LogEntry]:
    """Every kind of entry, and of rejection."""
    undecided = unmeasured(4, outcome=Outcome.INDETERMINATE, reason=Reason.VERIFIER_FAILED)
    return [
        rules(SPEC),
        policy(0),
        admitted(1),
        together(TOO_MUCH),
        rejected(3, node="88" * 32),
        undecided,
        unmeasured(5, reason=Reason.MALFORMED_SUBMISSION, tokens=0),
        batch(0, 1),
        policy(1),
        admitted(6, version=1, slot=1),
        admitted(7),
        batch(1, 7, gaps=[(0, slot) for slot in (0, 2, 3, 4, 5, 6)]),
        *(of_policy(1, one) for one in drifting(*[SHIFTED] * 12, HONEST_TOTALS)),
    ]


def of_policy(version: int, entry: VerdictEntry) -> VerdictEntry:
    return replace(entry, version=version, manifest_digest=policy(version).manifest_digest)


def early_log() -> list[LogEntry]:
    """A step is given its groups while its policy is still being published."""
    slots = [admitted(number, slot=number) for number in range(3)]
    return [rules(SPEC), policy(0), *slots, batch(0, 0), batch(1, 1, 2), policy(1), admitted(3, version=1, slot=0)]


def trusting_log() -> list[LogEntry]:
    """Nodes that are measured in part, are caught, are measured again, and are banned."""
    spotted = [admitted(number, spot=number % 2) for number in (3, 4, 5)]
    again = [admitted(number, recheck=True) for number in (3, 4)]
    failed = rejected(5, recheck=True, slot=5)
    return [
        rules(TRUSTING),
        policy(0),
        admitted(1),
        admitted(2, slot=11),
        *spotted[:2],
        batch(0, 1, 3),
        admitted(10),
        spotted[2],
        rejected(11),
        again[1],
        failed,
        batch(1, 4, 10, 2, gaps=[(0, slot) for slot in (0, 2, 5, 6, 7, 8, 9)]),
        unmeasured(12, reason=Reason.WRONG_SEED),
        unmeasured(13, reason=Reason.WRONG_SEED),
    ]


def dull_log() -> list[LogEntry]:
    """A group of equal rewards is measured again after the next step, which does not wait for it."""
    dull = admitted(3, spot=0, rewards=(1.0, 1.0))
    entries = [admitted(1), admitted(2), dull, rejected(4), batch(0, 1, 2), rejected(3, recheck=True)]
    return [rules(TRUSTING), policy(0), *entries]


def pooled_log() -> list[LogEntry]:
    """Slots whose problems follow from what earlier ones earned."""
    entries: list[LogEntry] = [rules(POOLED), policy(0)]
    means: dict[object, float] = {}
    turns = ((0,), range(1, 6), range(10, 16))
    for version in range(3):
        before = dict(means)
        for slot in range(6):
            digest = policy(version).manifest_digest
            candidate = first_candidate(
                POOLED,
                run_id=RUN,
                manifest_digest=digest,
                slot=slot,
                mean_of=lambda one, before=before: before.get(one),
            )
            number = 10 * version + slot
            rewards = (1.0, 1.0) if number % 3 == 0 else (0.0, 0.0)
            entry = admitted(number, version=version, slot=slot, candidate=candidate, rewards=rewards)
            entries.append(entry)
            problem = slot_problem(POOLED, run_id=RUN, manifest_digest=digest, slot=slot, candidate=candidate)
            means[problem] = sum(rewards) / 2
        entries += [batch(version, *turns[version]), policy(version + 1)]
    return entries


def by_page(leaves: list[bytes], spec: RunSpec) -> int | None:
    """The first entry that the independent auditor objects to."""
    value = decode_value(RUN_SPEC, encode(spec), max_bytes=2**18)
    audit = LogAudit(run_id=RUN, spec=value, spec_digest=spec.digest)
    audit.read(leaves)
    return min((len(leaves) if one.index is None else one.index for one in audit.disagreements), default=None)


def by_project(leaves: list[bytes], spec: RunSpec) -> int | None:
    """The first entry that the project's auditor objects to; the length of the log for the log as a whole."""
    problems = read_log(read_entries(leaves), run_id=RUN, spec=spec).problems
    return min((len(leaves) if one.log_index is None else one.log_index for one in problems), default=None)


LOGS: dict[str, tuple[Callable[[], list[LogEntry]], RunSpec]] = {
    "plain": (plain_log, SPEC),
    "early": (early_log, SPEC),
    "trusting": (trusting_log, TRUSTING),
    "dull": (dull_log, TRUSTING),
    "pooled": (pooled_log, POOLED),
}


def changed_verdict(entry: VerdictEntry, rng: random.Random) -> VerdictEntry:
    """A verdict with one field, or one of its finding, as a liar or a defect might have it."""
    field, values = rng.choice(list(FIELDS.items()))
    value = rng.choice(values)
    if isinstance(entry.finding, Finding) and rng.random() < 0.3:
        field, values = rng.choice(list(FINDING_FIELDS.items()))
        return replace(entry, finding=replace(entry.finding, **{field: rng.choice(values)}))
    return replace(entry, **{field: value})


def mutated(log: list[LogEntry], rng: random.Random) -> list[LogEntry]:
    """A log with one or two entries left out, repeated, moved or changed."""
    log = list(log)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(log))
        entry = log[at]
        match rng.randrange(6):
            case 0:
                del log[at]
            case 1:
                log.insert(rng.randrange(len(log) + 1), entry)
            case 2:
                log.insert(rng.randrange(len(log)), log.pop(at))
            case _ if isinstance(entry, VerdictEntry):
                log[at] = changed_verdict(entry, rng)
            case _ if isinstance(entry, BatchEntry):
                names = (*entry.submissions, submission(rng.randrange(12)))[rng.randrange(2) :]
                step, gaps = max(0, entry.step + rng.randrange(-1, 2)), (*entry.gaps, *gaps_of(rng.randrange(12)))
                changed = rng.choice(
                    ({"step": step, "submissions": names}, {"gaps": gaps[rng.randrange(2) :]}, {"missed": (BLAMED,)})
                )
                log[at] = replace(entry, **changed)
            case _ if isinstance(entry, PolicyEntry):
                log[at] = replace(entry, version=rng.randrange(4))
        if not log:
            return [entry]
    return log


FIELDS: dict[str, tuple[Any, ...]] = {
    "outcome": tuple(Outcome),
    "reason": (None, Reason.WRONG_TOKEN, Reason.WRONG_SEED, Reason.PROOF_MISMATCH, Reason.VERIFIER_FAILED),
    "finding": (None, FOUND, replace(FOUND, row=0, value=5.0)),
    "figures": (None, ZERO, WRONG, replace(ZERO, margin_evidence=13.0), replace(ZERO, sketch_distance=4.0)),
    "totals": (
        *(None, HONEST_TOTALS, SHIFTED, TOO_MUCH, Totals()),
        *(Totals(far=Total(count=10, sum=11.0)), Totals(sketch=Total(count=1, sum=0.0))),
        Totals(margin=Total(count=100, sum=10.1)),
    ),
    "rewards": (None, (0.0, 1.0), (1.0, 1.0), (1.0,), (0.5, 1.5), (-0.5, 0.5)),
    "tokens": (0, 99),
    "spot": (None, 0, 1, 2),
    "recheck": (False, True),
    "candidate": (UNSET, 0, 1, 2, 31),
    "version": (0, 1, 2),
    "slot": (0, 1, 3, 14),
    "node": ("22" * 32, "55" * 32, "66" * 32),
    "submission": (submission(1), submission(3), submission(99)),
    "request": (submission(99),),
    "body": ("34" * 32,),
}
FINDING_FIELDS: dict[str, tuple[Any, ...]] = {
    "row": (None, 0, 1, 2),
    "figure": ("token_margin", "margin_mean", "margin_evidence", "far_evidence", "margin_drift", "int8_gain", "none"),
    "value": (0.4, 0.6, 5.0, 14.0, 17.0, 1e9),
    "limit": (0.5, 1.0, 0.05),
    "reason": (Reason.WRONG_TOKEN, Reason.PROOF_MISMATCH),
}


@pytest.mark.parametrize("name", LOGS)
def test_an_honest_log_is_honest_to_both(name: str) -> None:
    make, spec = LOGS[name]
    leaves = [encode(entry) for entry in make()]
    assert (by_page(leaves, spec), by_project(leaves, spec)) == (None, None)


def at(index: int, entry: LogEntry | None = None, **changes: Any) -> Callable[[list[LogEntry]], None]:
    """Put another entry at an index, or the one that is there with `changes`."""

    def edit(log: list[LogEntry]) -> None:
        log[index] = replace(log[index], **changes) if entry is None else entry

    return edit


def before(index: int, entry: LogEntry) -> Callable[[list[LogEntry]], None]:
    return lambda log: log.insert(index, entry)


def unmeasured_for_long(log: list[LogEntry]) -> None:
    """Two hundred slots of one node, none of which happened to be measured in full, at a rate of a half."""
    log[4:] = [admitted(number, spot=0) for number in range(100, 300)]


def gaps_of(*slots: int) -> tuple[Gap, ...]:
    return tuple(Gap(version=0, slot=slot) for slot in slots)


BLAMED = MissedSlot(version=1, slot=0, node="22" * 32, how="expired")
ONE_SIDED = Totals(margin=Total(count=100, sum=1.05))
"""Evidence of 15 nats: over the limit of 13.8, and below that of a drift, 16.3."""
SEED = unmeasured(20, reason=Reason.WRONG_SEED)
LIES: dict[str, tuple[str, Callable[[list[LogEntry]], None], int]] = {
    "another run's rules": ("plain", at(0, run_id="12" * 32), 0),
    "the rules a second time": ("plain", before(2, rules(SPEC)), 2),
    "an older policy": ("plain", at(8, policy(0)), 8),
    "a policy whose step is not logged": ("plain", lambda log: log.pop(7), 7),
    "a policy before its step": ("plain", before(7, policy(1)), 7),
    "a step left out": ("pooled", at(8, batch(1, 0)), 8),
    "a policy that was not published": ("plain", at(9, manifest_digest="12" * 32), 9),
    "a second verdict on a submission": ("plain", before(7, unmeasured(5, reason=Reason.WRONG_SEED)), 7),
    "a slot admitted twice": ("plain", before(12, admitted(8, version=1, slot=1)), 12),
    "steps that fall": ("plain", at(11, batch(0, 7)), 11),
    "a group used twice": ("plain", at(11, batch(1, 7, 1)), 11),
    "a group left out in its turn": ("plain", at(11, submissions=(submission(6),)), 11),
    "a group before its turn": ("plain", at(11, submissions=(submission(7), submission(6))), 11),
    "groups in another order": ("early", at(6, batch(1, 2, 1)), 6),
    "a step without groups": ("early", at(5, batch(0)), 5),
    "a group left out at its last chance": ("early", at(6, batch(1, 1)), 6),
    "a slot admitted after its last chance": ("plain", before(12, admitted(20, slot=20)), 12),
    "slots left out without a word": ("plain", at(11, gaps=()), 11),
    "a gap that was admitted": ("plain", at(11, gaps=gaps_of(0, 1, 2, 3, 4, 5, 6)), 11),
    "a gap before its last chance": ("plain", at(7, gaps=gaps_of(0)), 7),
    "a gap that is admitted afterwards": ("plain", before(12, admitted(20, slot=0)), 12),
    "blame for a slot of another step": ("plain", at(11, missed=(BLAMED,)), 11),
    "a group that was rejected": ("plain", at(11, batch(1, 6, 3)), 11),
    "a group of an old policy": ("plain", at(11, batch(2, 7)), 11),
    "admitted with a reason": ("plain", at(2, reason=Reason.WRONG_SEED), 2),
    "admitted without figures": ("plain", at(2, figures=None), 2),
    "admitted without totals": ("plain", at(2, totals=None), 2),
    "admitted without rewards": ("plain", at(2, rewards=None), 2),
    "admitted over a limit": ("plain", at(2, figures=WRONG), 2),
    "admitted with one-sided values": ("plain", at(2, totals=ONE_SIDED), 2),
    "a reward over one": ("plain", at(2, rewards=(0.0, 1.5)), 2),
    "a reward too many": ("plain", at(2, rewards=(0.0, 1.0, 1.0)), 2),
    "rejected without a reason": ("plain", at(6, reason=None), 6),
    "rejected with rewards": ("plain", at(6, rewards=(0.0, 1.0)), 6),
    "rejected because the verifier failed": ("plain", at(6, reason=Reason.VERIFIER_FAILED), 6),
    "figures without a finding": ("plain", at(4, finding=None), 4),
    "a sum beyond the largest value": ("plain", at(4, totals=Totals(margin=Total(count=10, sum=1.1))), 4),
    "values of no level": ("plain", at(4, totals=Totals(sketch=Total(count=1, sum=0.0))), 4),
    "a finding of no such row": ("plain", at(4, finding=replace(FOUND, row=2)), 4),
    "a finding of no such figure": ("plain", at(4, finding=replace(FOUND, figure="none")), 4),
    "a finding with another limit": ("plain", at(4, finding=replace(FOUND, limit=0.5)), 4),
    "a finding within the limit": ("plain", at(4, finding=replace(FOUND, value=0.5)), 4),
    "a finding beyond the figures": ("plain", at(4, finding=replace(FOUND, value=6.0)), 4),
    "a finding for another reason": ("plain", at(4, reason=Reason.PROOF_MISMATCH), 4),
    "evidence that the totals do not show": ("plain", at(3, together(TOO_MUCH, value=20.0)), 3),
    "a candidate in a run without pools": ("plain", at(2, candidate=0), 2),
    "a drift of another size": ("plain", lambda log: lie_about_drift(log, value=17.0), 23),
    "admitted despite a drift": ("plain", lambda log: lie_about_drift(log, admit=True), 23),
    "one row on probation": ("trusting", at(3, spot=0), 3),
    "rejected by one row alone": ("trusting", at(9, spot=0), 9),
    "no second verdict before the next step": ("trusting", lambda log: log.pop(11), 11),
    "a second verdict on something else": ("trusting", at(10, tokens=99), 10),
    "a second verdict on what was measured in full": ("trusting", before(10, admitted(2, recheck=True)), 10),
    "equal rewards in a step": ("trusting", at(3, rewards=(1.0, 1.0)), 12),
    "more work for a banned node": ("trusting", before(15, SEED), 15),
    "chance that favours a node": ("trusting", unmeasured_for_long, 204),
    "another candidate": ("pooled", at(2, candidate=1), 2),
    "no candidate in a run with pools": ("pooled", at(2, candidate=UNSET), 2),
}
"""By what an operator does: the log, the change, and the entry to object to (the log's length for all of it)."""


def lie_about_drift(log: list[LogEntry], *, value: float = 0.0, admit: bool = False) -> None:
    """Alter the first rejection for a drift."""
    index = next(i for i, one in enumerate(log) if isinstance(one, VerdictEntry) and drifted(one))
    entry = log[index]
    assert isinstance(entry, VerdictEntry)
    if admit:
        log[index] = replace(entry, outcome=Outcome.ADMITTED, reason=None, finding=None, rewards=(0.0, 1.0))
    else:
        log[index] = replace(entry, finding=replace(entry.finding, value=value))


def drifted(entry: VerdictEntry) -> bool:
    return entry.finding is not None and entry.finding.figure.endswith("_drift")


@pytest.mark.parametrize("lie", LIES)
def test_both_object_to_a_lie_where_it_stands(lie: str) -> None:
    name, edit, wanted = LIES[lie]
    make, spec = LOGS[name]
    log = make()
    edit(log)
    leaves = [encode(entry) for entry in log]
    assert (by_page(leaves, spec), by_project(leaves, spec)) == (wanted, wanted)


def test_both_count_the_same_standing_and_credit() -> None:
    """A worker that reckons from the page what it has earned must not be told less."""
    make, spec = LOGS["trusting"]
    entries = make()
    value = decode_value(RUN_SPEC, encode(spec), max_bytes=2**18)
    for size in range(1, len(entries) + 1):
        audit = LogAudit(run_id=RUN, spec=value, spec_digest=spec.digest)
        audit.read([encode(entry) for entry in entries[:size]])
        theirs = read_log(entries[:size], run_id=RUN, spec=spec).accounts
        assert audit.accounts.keys() == theirs.keys()
        for node, account in theirs.items():
            own = audit.accounts[node]
            assert (own.standing.verified, own.standing.strikes, own.vested, own.unvested, own.void) == (
                account.standing.verified,
                account.standing.strikes,
                account.vested,
                account.pending,
                account.void,
            ), size


@pytest.mark.parametrize("name", LOGS)
def test_both_object_to_the_same_entry_of_a_log_that_was_tampered_with(name: str) -> None:
    """The first one: what comes after a lie depends on what one makes of it."""
    make, spec = LOGS[name]
    honest, rng, accused = make(), random.Random(21), 0
    for _ in range(MUTATIONS):
        leaves = [encode(entry) for entry in mutated(honest, rng)]
        found = by_page(leaves, spec)
        assert found == by_project(leaves, spec), b"\n".join(leaves).decode()
        accused += found is not None
    assert accused > MUTATIONS / 2, "most of these changes must be seen"
