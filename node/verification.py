"""From a submission to a verdict: the cheap checks, the prefills, the limits, the rewards (docs/protocol.md, 7).

Nothing here raises on what a worker sent. Whatever goes wrong on this side (out of memory, a broken policy, a
bug) ends in an indeterminate verdict, never in a rejection: `_guarded` is the one place that decides so. A policy
that cannot be had ends in no verdict at all: `PolicyAway`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from node.conversing import all_graded, asking, in_time
from node.environments import Environment, Problem, check_rewards
from node.measurement import Deviations
from node.parquet_reader import ParquetReader, VerifierFailed
from node.policy import Blueprint, render_prompt
from node.prefill import Measured, Measuring, Prefill, own_faults
from node.proofs import check_proof_form
from node.protocol.admission import Figures, Finding, Outcome, judge, judge_group, worst
from node.protocol.evidence import Totals, add
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import RunSpec
from node.protocol.slots import group_seeds, slot_problem
from node.protocol.submission import Expected, Rollout, check_rollouts
from node.protocol.turns import Replies
from node.second_look import Look, at_doubt, look_again

logger = logging.getLogger(__name__)

T = TypeVar("T")

Probe = Callable[[int], int | None]
"""From a claim's number of rows to the one that is measured and judged before the others; None: all together."""


def measure_all(rows: int) -> None:
    """The probe of whoever wants every row's figures, however bad the first of them are."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about one submission, and everything that follows from it.

    `row_figures` are those of the rows that were measured, by row: of all, unless one that was measured first
    failed, or was enough (`spot`). `figures` is the worst of each over them, `totals` what they sum up to,
    `row_totals` what each gives to that, `deviations` the numbers behind them; all are None where a check that needs no
    model refused.
    `rollouts`, `logprobs` and `rewards` are there only for `admitted`. The log-probabilities are recomputed ones where
    a row was measured: the submitted are compared, then dropped. `replies` are what the environment said in each
    rollout, once the checks that need no model have found out; () before.
    """

    outcome: Outcome
    reason: Reason | None = None
    finding: Finding | None = None
    detail: str = ""
    figures: Figures | None = None
    totals: Totals | None = None
    row_figures: Mapping[int, Figures] | None = None
    row_totals: Mapping[int, Totals] | None = None
    deviations: Mapping[int, Deviations] | None = None
    spot: int | None = None
    rewards: tuple[float, ...] | None = None
    tokens: int = 0
    rollouts: list[Rollout] | None = None
    logprobs: list[list[float]] | None = None
    replies: Sequence[Replies] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A submission that could be read: what somebody says is the work of `slot` of the leased policy `version`.

    One that is not `full` is admitted when everything that needs no model is right, and the row that is measured
    first: the standing of its node allows that (`node.protocol.standing`).
    """

    version: int
    manifest_digest: str
    slot: int
    rollouts: Sequence[Rollout]
    full: bool = True
    candidate: int = 0

    @property
    def tokens(self) -> int:
        """Completion tokens of the group."""
        return sum(len(rollout.completion_ids) for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Rules:
    """What every claim of a run is held to; `environments` are the run's, in its order.

    Raises EnvironmentFault or SandboxFailed where this machine cannot compute their rewards.
    """

    run_id: str
    spec: RunSpec
    environments: Sequence[Environment]

    def __post_init__(self) -> None:
        check_rewards(self.environments)


class PolicyAway(VerifierFailed):
    """A policy that a verification needs cannot be had now: no verdict follows."""

    code = "policy_away"


class Policies(Protocol):
    """Where the policies of a run come from; both methods raise PolicyAway."""

    async def blueprint(self, version: int) -> Blueprint:
        """Policy `version` without its weights: enough for the checks that need no model."""

    async def prefill(self, version: int) -> Prefill:
        """Policy `version`, ready to measure until the next call of this."""


def expected_of(
    spec: RunSpec,
    policy: Blueprint,
    environments: Sequence[Environment],
    *,
    run_id: str,
    version: int,
    manifest_digest: str,
    slot: int,
    candidate: int = 0,
    published: Collection[int] | None = None,
) -> Expected:
    """What a submission for `slot` of policy `version` must contain; `environments` are those of the run, in its order.

    `candidate` says for which of its problems the slot is, where the run has pools.
    `published` as in `Expected`: None leaves unchecked whether the versions that are named exist.
    """
    environment, problem = _problem_of(
        spec, environments, run_id=run_id, manifest_digest=manifest_digest, slot=slot, candidate=candidate
    )
    return Expected(
        version=version,
        published=published,
        prompt_ids=render_prompt(policy, problem.prompt),
        seeds=group_seeds(spec, run_id=run_id, manifest_digest=manifest_digest, slot=slot),
        vocabulary=policy.vocabulary,
        eos_ids=policy.eos_ids,
        ask=asking(policy, environment, problem, sampling=spec.sampling),
    )


async def verify(
    body: bytes | Path,
    *,
    reader: ParquetReader,
    version: int,
    manifest_digest: str,
    slot: int,
    candidate: int = 0,
    policies: Policies,
    published: Collection[int],
    rules: Rules,
    probe: Probe = secrets.randbelow,
    look: Look = at_doubt,
) -> Verdict:
    """The verdict on a submission as it arrived; never raises on account of it. Arguments as `Claim`, `decide_many`.

    Raises PolicyAway.
    """
    rollouts = await read(body, reader=reader, spec=rules.spec)
    if isinstance(rollouts, Verdict):
        return rollouts
    claim = Claim(version=version, manifest_digest=manifest_digest, slot=slot, candidate=candidate, rollouts=rollouts)
    (verdict,) = await decide_many([claim], policies=policies, published=published, rules=rules, probe=probe, look=look)
    if isinstance(verdict, PolicyAway):
        raise verdict
    return verdict


async def read(body: bytes | Path, *, reader: ParquetReader, spec: RunSpec) -> list[Rollout] | Verdict:
    """The rollouts of a submission as it arrived, or the verdict that it cannot be read."""
    return await asyncio.to_thread(_guarded, partial(reader.read, body, spec=spec), tokens=0)


async def decide_many(
    claims: Sequence[Claim],
    *,
    policies: Policies,
    published: Collection[int],
    rules: Rules,
    probe: Probe = secrets.randbelow,
    look: Look = at_doubt,
) -> list[Verdict | PolicyAway]:
    """For each claim a verdict in the order of section 7, or the policy that it could not be measured under.

    `published` are the versions that the run has published so far, from the one before the oldest claim's on. Only
    the policies that drew something in a claim which passed every check without a model are asked for, one after the
    other, and claims share their forward passes. A claim's verdict does not depend on the claims beside it: a failure
    while several are measured together is nobody's, and they are then measured one by one.

    `probe` chooses the row of each claim that is measured first. Where that row alone is over a limit, it is the
    verdict's finding and the others cost nothing. By default nobody can foresee it, so that one honest row among
    invented ones does not buy a prefill of them. `look` says which groups that would pass are looked at again.
    """
    cases = [_Case(claim, rules) for claim in claims]
    for case in cases:
        await case.check(policies, published)
    passed = [case for case in cases if case.ended is None]
    for case in passed:
        first = probe(len(case.claim.rollouts))
        case.due = list(range(len(case.claim.rollouts))) if first is None else [first]
    await _measure_due(passed, policies, spec=rules.spec)
    # The newest policy was asked last, and is still at hand.
    going_on = [case for case in passed if case.ended is None]
    await _measure_due(going_on, policies, spec=rules.spec, newest_first=True)
    for case in going_on:
        await case.look_again(look, policies, published)
    return [case.ended for case in cases if case.ended is not None]


async def _measure_due(
    cases: Sequence[_Case], policies: Policies, *, spec: RunSpec, newest_first: bool = False
) -> None:
    """Have the rows measured that are due in each case, under one policy after the other, and judge what is known."""
    measuring = Measuring(
        [case.claim.rollouts for case in cases],
        spec=spec,
        rows=[case.due for case in cases],
        replies=[case.replies for case in cases],
    )
    for version in sorted(measuring.versions, reverse=newest_first):
        await _measure(measuring, version, policies)
    for group, case in enumerate(cases):
        await asyncio.to_thread(case.take, measuring.result(group))


async def _measure(measuring: Measuring, version: int, policies: Policies) -> None:
    """Let one policy measure its part of every claim that is still open."""
    waiting = measuring.waiting(version)
    if not waiting:
        return
    try:
        prefill = await policies.prefill(version)
    except PolicyAway as error:
        for group in waiting:
            measuring.fail(group, error)
        return
    await asyncio.to_thread(measuring.measure, prefill, version)


@dataclass
class _Case:
    """One claim on its way to a verdict; `ended` once it has one, or its policy cannot be had.

    `due` are the rows to be measured next; `figures`, `totals`, `logprobs` and `deviations` are what is known of the
    others, by row. `replies` are what the environment said in each row.
    """

    claim: Claim
    rules: Rules
    blueprint: Blueprint = field(init=False)
    ended: Verdict | PolicyAway | None = None
    due: list[int] = field(default_factory=list)
    replies: Sequence[Replies] = ()
    figures: dict[int, Figures] = field(default_factory=dict)
    totals: dict[int, Totals] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    deviations: dict[int, Deviations] = field(default_factory=dict)

    async def check(self, policies: Policies, published: Collection[int]) -> None:
        """Everything that needs no model."""
        try:
            self.blueprint = await policies.blueprint(self.claim.version)
        except PolicyAway as error:
            self.ended = error
            return
        self.ended = await asyncio.to_thread(_guarded, partial(self._check, published), tokens=self.claim.tokens)

    def _check(self, published: Collection[int]) -> None:
        expected = expected_of(
            self.rules.spec,
            self.blueprint,
            self.rules.environments,
            run_id=self.rules.run_id,
            version=self.claim.version,
            manifest_digest=self.claim.manifest_digest,
            slot=self.claim.slot,
            candidate=self.claim.candidate,
            published=published,
        )
        if expected.ask is not None:
            expected = replace(expected, ask=in_time(expected.ask))
        self.replies = check_rollouts(self.claim.rollouts, expected=expected, spec=self.rules.spec)
        check_proof_form(self.claim.rollouts, self.replies, hidden=self.blueprint.hidden, spec=self.rules.spec.proofs)

    def take(self, measured: Measured | Refusal | VerifierFailed) -> None:
        """Draw what follows from what the policies say of the rows that were due: the end, or that others are."""
        if isinstance(measured, PolicyAway):
            self.ended = measured
        else:
            self.ended = _guarded(partial(self._take, measured), tokens=self.claim.tokens)

    def _take(self, measured: Measured | Refusal | VerifierFailed) -> Verdict | None:
        if isinstance(measured, Exception):
            raise measured
        self.figures.update(zip(self.due, measured.figures, strict=True))
        self.totals.update(zip(self.due, measured.totals, strict=True))
        self.logprobs.update(zip(self.due, measured.logprobs, strict=True))
        self.deviations.update(zip(self.due, measured.deviations, strict=True))
        self.due = [row for row in range(len(self.claim.rollouts)) if row not in self.figures]
        enough = not self.due or not self.claim.full
        finding = self._finding(enough=enough)
        if finding is not None:
            return self._rejected(finding)
        return self._admitted() if enough else None

    def _finding(self, *, enough: bool) -> Finding | None:
        """What is wrong with a row; then, once no other is to be measured, with all that were."""
        limits, rows = self.rules.spec.limits, sorted(self.figures)
        finding = judge([self.figures[row] for row in rows], limits=limits)
        if finding is not None and finding.row is not None:
            return msgspec.structs.replace(finding, row=rows[finding.row])
        return judge_group(self._together(), limits=limits) if enough else None

    def _together(self) -> Totals:
        return add(self.totals[row] for row in sorted(self.totals))

    def _rejected(self, finding: Finding) -> Verdict:
        whose = "All rows together" if finding.row is None else f"Row {finding.row}"
        return Verdict(
            outcome=Outcome.REJECTED,
            reason=finding.reason,
            finding=finding,
            detail=f"{whose}: {finding.figure} is {finding.value:.6g}, the limit is {finding.limit:.6g}.",
            figures=worst(list(self.figures.values())),
            totals=self._together(),
            row_figures=self.figures,
            row_totals=self.totals,
            deviations=self.deviations,
            tokens=self.claim.tokens,
            replies=self.replies,
        )

    def _admitted(self) -> Verdict:
        return Verdict(
            outcome=Outcome.ADMITTED,
            figures=worst(list(self.figures.values())),
            totals=self._together(),
            row_figures=self.figures,
            row_totals=self.totals,
            deviations=self.deviations,
            spot=min(self.figures) if self.due else None,
            rewards=tuple(self._rewards()),
            tokens=self.claim.tokens,
            rollouts=list(self.claim.rollouts),
            logprobs=[self.logprobs.get(row, rollout.logprobs) for row, rollout in enumerate(self.claim.rollouts)],
            replies=self.replies,
        )

    async def look_again(self, look: Look, policies: Policies, published: Collection[int]) -> None:
        """Compare a group that would be admitted with the weights that somebody may have used instead."""
        verdict, limits = self.ended, self.rules.spec.limits
        if not isinstance(verdict, Verdict) or verdict.totals is None or verdict.outcome is not Outcome.ADMITTED:
            return
        if verdict.spot is not None or not look(verdict.totals, limits):
            return
        try:
            with own_faults("the second look"):
                finding = await look_again(
                    self.claim.rollouts,
                    self.replies,
                    version=self.claim.version,
                    policies=policies,
                    published=published,
                    spec=self.rules.spec,
                )
        except PolicyAway as error:
            self.ended = error
        except VerifierFailed as error:
            self.ended = undecided(error, tokens=self.claim.tokens)
        else:
            self.ended = self.ended if finding is None else self._rejected(finding)

    def _rewards(self) -> Iterator[float]:
        environment, problem = _problem_of(
            self.rules.spec,
            self.rules.environments,
            run_id=self.rules.run_id,
            manifest_digest=self.claim.manifest_digest,
            slot=self.claim.slot,
            candidate=self.claim.candidate,
        )
        completions = [rollout.completion_ids for rollout in self.claim.rollouts]
        for reward in all_graded(self.blueprint, environment, problem, completions):
            if not 0.0 <= reward <= 1.0:
                raise VerifierFailed(f"the environment {environment.name} gave the reward {reward}")
            yield reward


def _problem_of(
    spec: RunSpec, environments: Sequence[Environment], *, run_id: str, manifest_digest: str, slot: int, candidate: int
) -> tuple[Environment, Problem]:
    drawn = slot_problem(spec, run_id=run_id, manifest_digest=manifest_digest, slot=slot, candidate=candidate)
    environment = environments[drawn.environment]
    return environment, environment.problem(drawn.problem)


def _guarded(step: Callable[[], T], *, tokens: int) -> T | Verdict:
    """What `step` returns, or the verdict that its failure means: a Refusal is the sender's, all else is ours.

    The log gets the kind of our failure; its text, which may name paths, goes to this process's own log.
    """
    try:
        with own_faults("verification"):
            return step()
    except Refusal as refusal:
        return Verdict(outcome=Outcome.REJECTED, reason=refusal.reason, detail=refusal.detail, tokens=tokens)
    except VerifierFailed as error:
        return undecided(error, tokens=tokens)


def undecided(error: VerifierFailed, *, tokens: int = 0) -> Verdict:
    """The verdict of a verifier that could not judge, for a reason of its own."""
    logger.error("could not verify a submission", exc_info=error)
    kind = type(error.__cause__ or error).__name__
    return Verdict(outcome=Outcome.INDETERMINATE, reason=Reason.VERIFIER_FAILED, detail=f"{kind}.", tokens=tokens)
