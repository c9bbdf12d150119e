"""From a submission to a verdict: the cheap checks, the prefills, the limits, the rewards (docs/protocol.md, 7).

Nothing here raises on what a worker sent. Whatever goes wrong on this side (out of memory, a broken policy, a
bug) ends in an indeterminate verdict, never in a rejection: `_guarded` is the one place that decides so. A policy
that cannot be had ends in no verdict at all: `PolicyAway`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from node.environments import Environment, Problem
from node.parquet_reader import ParquetReader, VerifierFailed
from node.policy import Blueprint, render_completion, render_prompt
from node.prefill import Measured, Measuring, Prefill, own_faults
from node.protocol.admission import Figures, Finding, Outcome, judge, worst
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import RunSpec
from node.protocol.slots import group_seeds, slot_problem
from node.protocol.submission import Expected, Rollout, Unpublished, check_rollouts

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about one submission, and everything that follows from it.

    `figures` is the worst of each over the group, None where a check that needs no model refused. `rollouts`,
    `logprobs` (recomputed ones: the submitted are compared, then dropped) and `rewards` are there only for
    `admitted`. `awaits` is set for a rejection that would not hold if the run published this version: whoever
    knows that it may still come waits for it.
    """

    outcome: Outcome
    reason: Reason | None = None
    finding: Finding | None = None
    detail: str = ""
    figures: Figures | None = None
    rewards: tuple[float, ...] | None = None
    tokens: int = 0
    awaits: int | None = None
    rollouts: list[Rollout] | None = None
    logprobs: list[list[float]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A submission that could be read: what somebody says is the work of `slot` of the leased policy `version`."""

    version: int
    manifest_digest: str
    slot: int
    rollouts: Sequence[Rollout]

    @property
    def tokens(self) -> int:
        """Completion tokens of the group."""
        return sum(len(rollout.completion_ids) for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Rules:
    """What every claim of a run is held to; `environments` are the run's, in its order."""

    run_id: str
    spec: RunSpec
    environments: Sequence[Environment]


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
    published: Collection[int] | None = None,
) -> Expected:
    """What a submission for `slot` of policy `version` must contain; `environments` are those of the run, in its order.

    `published` as in `Expected`: None leaves unchecked whether the versions that are named exist.
    """
    _, problem = _problem_of(spec, environments, run_id=run_id, manifest_digest=manifest_digest, slot=slot)
    return Expected(
        version=version,
        published=published,
        prompt_ids=render_prompt(policy, problem.prompt),
        seeds=group_seeds(spec, run_id=run_id, manifest_digest=manifest_digest, slot=slot),
        vocabulary=policy.vocabulary,
        eos_ids=policy.eos_ids,
    )


async def verify(
    body: bytes | Path,
    *,
    reader: ParquetReader,
    version: int,
    manifest_digest: str,
    slot: int,
    policies: Policies,
    published: Collection[int],
    rules: Rules,
) -> Verdict:
    """The verdict on a submission as it arrived; never raises on account of it. Arguments as `Claim`, `decide_many`.

    Raises PolicyAway.
    """
    read = partial(reader.read, body, spec=rules.spec)
    rollouts = await asyncio.to_thread(_guarded, read, tokens=0)
    if isinstance(rollouts, Verdict):
        return rollouts
    claim = Claim(version=version, manifest_digest=manifest_digest, slot=slot, rollouts=rollouts)
    (verdict,) = await decide_many([claim], policies=policies, published=published, rules=rules)
    if isinstance(verdict, PolicyAway):
        raise verdict
    return verdict


async def decide_many(
    claims: Sequence[Claim], *, policies: Policies, published: Collection[int], rules: Rules
) -> list[Verdict | PolicyAway]:
    """For each claim a verdict in the order of section 7, or the policy that it could not be measured under.

    `published` are the versions that the run has published so far, from the oldest claim's on. Only the policies
    that drew something in a claim which passed every check without a model are asked for, one after the other in
    ascending order, and claims share their forward passes. A claim's verdict does not depend on the claims beside
    it: a failure while several are measured together is nobody's, and they are then measured one by one.
    """
    cases = [_Case(claim, rules) for claim in claims]
    for case in cases:
        await case.check(policies, published)
    passed = [case for case in cases if case.ended is None]
    measuring = Measuring([case.claim.rollouts for case in passed], spec=rules.spec)
    for version in measuring.versions:
        await _measure(measuring, version, policies)
    for group, case in enumerate(passed):
        case.ended = await asyncio.to_thread(case.judge, measuring.result(group))
    return [case.ended for case in cases if case.ended is not None]


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
    """One claim on its way to a verdict; `ended` once it has one, or its policy cannot be had."""

    claim: Claim
    rules: Rules
    blueprint: Blueprint = field(init=False)
    ended: Verdict | PolicyAway | None = None

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
            published=published,
        )
        check_rollouts(self.claim.rollouts, expected=expected, spec=self.rules.spec)

    def judge(self, measured: Measured | Refusal | VerifierFailed) -> Verdict | PolicyAway:
        """What follows from what the policies say."""
        if isinstance(measured, PolicyAway):
            return measured
        return _guarded(partial(self._judge, measured), tokens=self.claim.tokens)

    def _judge(self, measured: Measured | Refusal | VerifierFailed) -> Verdict:
        if isinstance(measured, Exception):
            raise measured
        finding = judge(measured.figures, limits=self.rules.spec.limits)
        if finding is not None:
            return Verdict(
                outcome=Outcome.REJECTED,
                reason=finding.reason,
                finding=finding,
                detail=f"Row {finding.row}: {finding.figure} is {finding.value:.6g}, the limit is {finding.limit:.6g}.",
                figures=worst(measured.figures),
                tokens=self.claim.tokens,
            )
        return Verdict(
            outcome=Outcome.ADMITTED,
            figures=worst(measured.figures),
            rewards=tuple(self._rewards()),
            tokens=self.claim.tokens,
            rollouts=list(self.claim.rollouts),
            logprobs=measured.logprobs,
        )

    def _rewards(self) -> Iterator[float]:
        environment, problem = _problem_of(
            self.rules.spec,
            self.rules.environments,
            run_id=self.rules.run_id,
            manifest_digest=self.claim.manifest_digest,
            slot=self.claim.slot,
        )
        for rollout in self.claim.rollouts:
            reward = environment.reward(problem, render_completion(self.blueprint, rollout.completion_ids))
            if not 0.0 <= reward <= 1.0:
                raise VerifierFailed(f"the environment {environment.name} gave the reward {reward}")
            yield reward


def _problem_of(
    spec: RunSpec, environments: Sequence[Environment], *, run_id: str, manifest_digest: str, slot: int
) -> tuple[Environment, Problem]:
    drawn = slot_problem(spec, run_id=run_id, manifest_digest=manifest_digest, slot=slot)
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
        awaits = refusal.version if isinstance(refusal, Unpublished) else None
        return Verdict(
            outcome=Outcome.REJECTED, reason=refusal.reason, detail=refusal.detail, tokens=tokens, awaits=awaits
        )
    except VerifierFailed as error:
        logger.exception("could not verify a submission")
        kind = type(error.__cause__ or error).__name__
        return Verdict(outcome=Outcome.INDETERMINATE, reason=Reason.VERIFIER_FAILED, detail=f"{kind}.", tokens=tokens)
