"""Judgement of measurements: every rule of docs/protocol.md, section 7, in its order, without IO.

`judge_claim` is a function of a plan and of measurements, so verifier, auditor and challenger reach the same verdict.
While measurements are missing, it returns which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from node.protocol.admission import Figures, Finding, Outcome, Verdict, judge_gain, judge_group, judge_rows, worst
from node.protocol.evidence import Totals, add
from node.protocol.reasons import Refusal
from node.protocol.run import LimitsSpec
from node.protocol.submission import Rollout
from node.protocol.turns import Replies
from node.verification.deviations import RowMeasured
from node.verification.plan import Plan


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of a claim so far: rows by number, rewards, and gains by suspect."""

    rows: Mapping[int, RowMeasured] = field(default_factory=dict)
    rewards: tuple[float, ...] | None = None
    gains: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NeedsRows:
    """These rows must be measured next."""

    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class NeedsRewards:
    """The rewards must be computed next."""


@dataclass(frozen=True, slots=True)
class NeedsGain:
    """The gain towards the weights `suspect` must be measured next (section 7.4)."""

    suspect: str


Due = NeedsRows | NeedsRewards | NeedsGain


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedClaim:
    """A verdict with the rollouts and measurements behind it.

    `rows` are the measured ones, by number; `replies` what the environment said in each rollout. Both are empty where
    a check that needs no model refused, or the verifier failed.
    """

    verdict: Verdict
    rollouts: Sequence[Rollout] = ()
    replies: Sequence[Replies] = ()
    rows: Mapping[int, RowMeasured] = field(default_factory=dict)

    @property
    def experts(self) -> list[bytes]:
        """The experts that each rollout's tokens met (`RowMeasured`), b"" in rows that were not measured."""
        return [self.rows[row].experts if row in self.rows else b"" for row in range(len(self.rollouts))]

    @property
    def logprobs(self) -> list[Sequence[float]] | None:
        """The log-probabilities to train on, recomputed in measured rows; None unless the group is admitted."""
        if self.verdict.outcome is not Outcome.ADMITTED:
            return None
        return [
            self.rows[row].logprobs if row in self.rows else rollout.logprobs
            for row, rollout in enumerate(self.rollouts)
        ]


def judge_claim(plan: Plan, seen: Measurements) -> Verdict | Due:
    """Return the verdict on a planned claim, or what has to be measured before there can be one."""
    spec, rows = plan.rules.spec, dict[int, RowMeasured]()
    for stage in plan.stages:
        if any(row not in seen.rows for row in stage):
            return NeedsRows(stage)
        rows |= {row: seen.rows[row] for row in stage}
        finding = find_excess(rows, limits=spec.limits, complete=stage is plan.stages[-1])
        if finding is not None:
            return _rejected(plan, rows, finding)
    if seen.rewards is None:
        return NeedsRewards()
    if plan.spot is None and spec.proofs.has_sketch and plan.look(_totals(rows), spec.limits):
        for suspect in spec.limits.suspects:
            if suspect not in seen.gains:
                return NeedsGain(suspect)
            finding = judge_gain(suspect, seen.gains[suspect], limits=spec.limits)
            if finding is not None:
                return _rejected(plan, rows, finding)
    return Verdict(
        outcome=Outcome.ADMITTED,
        figures=_worst(rows),
        totals=_totals(rows),
        rewards=seen.rewards,
        tokens=plan.claim.tokens,
        spot=plan.spot,
    )


def find_excess(rows: Mapping[int, RowMeasured], *, limits: LimitsSpec, complete: bool = True) -> Finding | None:
    """Return the first finding of a row, else (if `complete`) of all rows together; None without one."""
    finding = judge_rows({number: row.figures for number, row in rows.items()}, limits=limits)
    return judge_group(_totals(rows), limits=limits) if finding is None and complete else finding


def refused(refusal: Refusal, *, tokens: int = 0) -> Verdict:
    """Return the rejection for a refusal, which is the sender's fault."""
    return Verdict(outcome=Outcome.REJECTED, reason=refusal.reason, detail=refusal.detail, tokens=tokens)


def _rejected(plan: Plan, rows: Mapping[int, RowMeasured], finding: Finding) -> Verdict:
    return Verdict(
        outcome=Outcome.REJECTED,
        reason=finding.reason,
        finding=finding,
        detail=finding.sentence,
        figures=_worst(rows),
        totals=_totals(rows),
        tokens=plan.claim.tokens,
    )


def _worst(rows: Mapping[int, RowMeasured]) -> Figures:
    return worst([row.figures for row in rows.values()])


def _totals(rows: Mapping[int, RowMeasured]) -> Totals:
    return add(rows[number].totals for number in sorted(rows))
