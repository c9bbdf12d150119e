"""Entries of a log as an honest coordinator writes them, for tests of whoever reads it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from node.protocol.admission import Figures, Finding, Outcome, judge_drift, judge_group
from node.protocol.evidence import Drift, Total, Totals, evidence_limit, follow
from node.protocol.messages import BatchEntry, Gap, PolicyEntry, VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import (
    BatchSpec,
    EnvironmentSpec,
    HonestSpec,
    LevelSpec,
    LimitsSpec,
    RunSpec,
    SamplingSpec,
    StandingSpec,
)
from node.verification.deviations import Deviations, RowMeasured

RUN = "11" * 32
SPEC = RunSpec(
    name="t",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=2),
    batch=BatchSpec(groups_per_step=1, max_async=1),
    standing=StandingSpec(ban_after=1000),
    limits=LimitsSpec(honest=HonestSpec(margin=LevelSpec(mean=0.001, variance=1e-4, largest=0.1))),
)
ZERO = Figures(**dict.fromkeys(Figures.__struct_fields__, 0.0))
WRONG = msgspec.structs.replace(ZERO, token_margin=5.0)
FOUND = Finding(reason=Reason.WRONG_TOKEN, row=1, figure="token_margin", value=5.0, limit=SPEC.limits.token_margin)
HONEST_TOTALS = Totals(margin=Total(count=100, sum=0.1))
SHIFTED = Totals(margin=Total(count=100, sum=0.35))
TOO_MUCH = Totals(margin=Total(count=100, sum=2.5))
replace = msgspec.structs.replace


def submission(number: int) -> str:
    return f"{number:064x}"


def row_of(figures: Figures, totals: Totals = HONEST_TOTALS) -> RowMeasured:
    """What an auditor measured of one row."""
    nothing = Deviations((), (), (), (), (), ())
    return RowMeasured(figures=figures, totals=totals, logprobs=(), deviations=nothing)


def admitted(number: int, *, version: int = 0, slot: int | None = None, **changes: object) -> VerdictEntry:
    entry = VerdictEntry(
        submission=submission(number),
        node="22" * 32,
        version=version,
        manifest_digest=f"{version + 100:064x}",
        slot=number if slot is None else slot,
        request=submission(number),
        body="33" * 32,
        outcome=Outcome.ADMITTED,
        reason=None,
        finding=None,
        detail="",
        figures=ZERO,
        totals=HONEST_TOTALS,
        rewards=(0.0, 1.0),
        tokens=100,
        decided_at=1,
    )
    return replace(entry, **changes)


def rejected(number: int, **changes: object) -> VerdictEntry:
    entry = admitted(number, outcome=Outcome.REJECTED, reason=Reason.WRONG_TOKEN, figures=WRONG, rewards=None)
    return replace(entry, **({"finding": FOUND} | changes))


def unmeasured(number: int, **changes: object) -> VerdictEntry:
    return rejected(number, **({"finding": None, "figures": None, "totals": None} | changes))


def policy(version: int) -> PolicyEntry:
    return PolicyEntry(version=version, manifest_digest=f"{version + 100:064x}", result_digest="44" * 32)


def batch(step: int, *numbers: int, gaps: Sequence[tuple[int, int]] = (), **changes: object) -> BatchEntry:
    """A step, with `gaps` as (version, slot)."""
    missing = tuple(Gap(version=version, slot=slot) for version, slot in gaps)
    return replace(BatchEntry(step=step, submissions=tuple(map(submission, numbers)), gaps=missing), **changes)


def together(totals: Totals, **changes: object) -> VerdictEntry:
    """A rejection for what all rows show, with `changes` to its finding."""
    found = judge_group(totals, limits=SPEC.limits)
    finding = Finding(
        reason=Reason.WRONG_TOKEN,
        row=None,
        figure="margin_evidence",
        value=found.value if found else 20.0,
        limit=evidence_limit(SPEC.limits),
    )
    reason = changes.get("reason", finding.reason)
    return rejected(2, finding=replace(finding, **changes), reason=reason, figures=ZERO, totals=totals, node="77" * 32)


def drifting(*slots: Totals, node: str = "55" * 32, first: int = 100) -> list[VerdictEntry]:
    """What an honest coordinator logs of a node whose slots sum up to these."""
    drift, entries = Drift(), []
    for number, totals in enumerate(slots, first):
        drift = follow(drift, totals, limits=SPEC.limits)
        finding = judge_drift(drift, limits=SPEC.limits)
        entry = admitted(number, node=node, totals=totals)
        if finding is not None:
            changes = {"outcome": Outcome.REJECTED, "reason": finding.reason, "rewards": None}
            entry = replace(entry, finding=finding, **changes)
        entries.append(entry)
    return entries
