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

from node.audit.log import read_entries, read_log
from node.protocol.admission import Finding, Outcome
from node.protocol.evidence import Total, Totals
from node.protocol.messages import BatchEntry, LogEntry, PolicyEntry, RunEntry, VerdictEntry
from node.protocol.pools import first_candidate
from node.protocol.reasons import Reason
from node.protocol.run import EnvironmentSpec, PoolsSpec, ProblemsSpec, RunSpec, StandingSpec
from node.protocol.slots import slot_problem
from shardcast.wire import encode

MUTATIONS = 25
TRUSTING = replace(
    SPEC,
    standing=StandingSpec(probation=1, full_rate_floor=0.01, vesting=1, ban_after=2),
    batch=replace(SPEC.batch, max_leases_per_node=2, only_signal=True),
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
        *drifting(*[SHIFTED] * 7, HONEST_TOTALS),
        admitted(6, version=1, slot=1),
        batch(1, 6, 100),
    ]


def trusting_log() -> list[LogEntry]:
    """Nodes that are measured in part, are caught, are measured again, and are banned."""
    spotted = [admitted(number, spot=number % 2) for number in (3, 4, 5)]
    again = [admitted(number, recheck=True) for number in (3, 4)]
    failed = rejected(5, recheck=True, slot=5)
    return [
        rules(TRUSTING),
        policy(0),
        admitted(1),
        admitted(2),
        *spotted[:2],
        batch(0, 1, 3),
        admitted(10),
        spotted[2],
        rejected(11),
        again[1],
        failed,
        batch(1, 2, 4),
        unmeasured(12, reason=Reason.WRONG_SEED),
        unmeasured(13, reason=Reason.WRONG_SEED),
    ]


def pooled_log() -> list[LogEntry]:
    """Slots whose problems follow from what earlier ones earned."""
    entries: list[LogEntry] = [rules(POOLED), policy(0)]
    means: dict[object, float] = {}
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
        entries += [batch(version, 10 * version), policy(version + 1)]
    return entries


def by_page(leaves: list[bytes], spec: RunSpec) -> int | None:
    """The first entry that the independent auditor objects to."""
    value = decode_value(RUN_SPEC, encode(spec), max_bytes=2**18)
    audit = LogAudit(run_id=RUN, spec=value, spec_digest=spec.digest)
    audit.read(leaves)
    return min((len(leaves) if one.index is None else one.index for one in audit.disagreements), default=None)


def by_project(leaves: list[bytes], spec: RunSpec) -> int | None:
    """The first entry that the project's auditor objects to; the length of the log for the log as a whole."""
    entries, malformed = read_entries(leaves)
    problems = [*malformed, *read_log(entries, run_id=RUN, spec=spec).problems]
    return min((len(leaves) if one.log_index is None else one.log_index for one in problems), default=None)


LOGS: dict[str, tuple[Callable[[], list[LogEntry]], RunSpec]] = {
    "plain": (plain_log, SPEC),
    "trusting": (trusting_log, TRUSTING),
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
                log[at] = replace(entry, step=max(0, entry.step + rng.randrange(-1, 2)), submissions=names)
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
