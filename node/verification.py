"""From a submission to a verdict: the cheap checks, one prefill, the limits, the rewards (docs/protocol.md, 7).

Nothing here raises on what a worker sent. Whatever goes wrong on this side (out of memory, a broken policy, a
bug) ends in an indeterminate verdict, never in a rejection: `_guarded` is the one place that decides so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from node.environments import Environment, Problem
from node.parquet_reader import ParquetReader, VerifierFailed
from node.policy import Policy, render_completion, render_prompt
from node.prefill import Measured, measure, measure_many, own_faults
from node.protocol.admission import Figures, Finding, Outcome, judge, worst
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import RunSpec
from node.protocol.slots import group_seeds, slot_problem
from node.protocol.submission import Expected, Rollout, check_rollouts

__all__ = [
    "Claim",
    "Measured",
    "Verdict",
    "VerifierFailed",
    "decide",
    "decide_many",
    "expected_of",
    "measure",
    "verify",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about one submission, and everything that follows from it.

    `figures` is the worst of each over the group, None where a check that needs no model refused. `rollouts`,
    `logprobs` (recomputed ones: the submitted are compared, then dropped) and `rewards` are there only for
    `admitted`.
    """

    outcome: Outcome
    reason: Reason | None = None
    finding: Finding | None = None
    detail: str = ""
    figures: Figures | None = None
    rewards: tuple[float, ...] | None = None
    tokens: int = 0
    rollouts: list[Rollout] | None = None
    logprobs: list[list[float]] | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A submission that could be read: what somebody says is the work of `slot`."""

    slot: int
    rollouts: Sequence[Rollout]

    @property
    def tokens(self) -> int:
        """Completion tokens of the group."""
        return sum(len(rollout.completion_ids) for rollout in self.rollouts)


def expected_of(
    spec: RunSpec,
    policy: Policy,
    environments: Sequence[Environment],
    *,
    run_id: str,
    manifest_digest: str,
    slot: int,
) -> Expected:
    """What a submission for `slot` must contain; `environments` are those of the run, in its order."""
    _, problem = _problem_of(spec, environments, run_id=run_id, manifest_digest=manifest_digest, slot=slot)
    return Expected(
        prompt_ids=render_prompt(policy, problem.prompt),
        seeds=group_seeds(spec, run_id=run_id, manifest_digest=manifest_digest, slot=slot),
        vocabulary=policy.vocabulary,
        eos_ids=policy.eos_ids,
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    """What every claim of one policy is measured against."""

    run_id: str
    manifest_digest: str
    policy: Policy
    environments: Sequence[Environment]
    spec: RunSpec

    def expected(self, slot: int) -> Expected:
        return expected_of(
            self.spec,
            self.policy,
            self.environments,
            run_id=self.run_id,
            manifest_digest=self.manifest_digest,
            slot=slot,
        )

    def problem(self, slot: int) -> tuple[Environment, Problem]:
        return _problem_of(
            self.spec, self.environments, run_id=self.run_id, manifest_digest=self.manifest_digest, slot=slot
        )


def verify(
    body: bytes | Path,
    *,
    reader: ParquetReader,
    run_id: str,
    manifest_digest: str,
    slot: int,
    policy: Policy,
    environments: Sequence[Environment],
    spec: RunSpec,
) -> Verdict:
    """The verdict on a submission as it arrived; never raises on account of it."""
    claim = read_claim(body, reader=reader, slot=slot, spec=spec)
    if isinstance(claim, Verdict):
        return claim
    return decide(
        claim.rollouts,
        run_id=run_id,
        manifest_digest=manifest_digest,
        slot=slot,
        policy=policy,
        environments=environments,
        spec=spec,
    )


def read_claim(body: bytes | Path, *, reader: ParquetReader, slot: int, spec: RunSpec) -> Claim | Verdict:
    """What `body` claims for `slot`, or the verdict where it cannot be read; for `decide_many`."""
    return _guarded(lambda: Claim(slot=slot, rollouts=reader.read(body, spec=spec)), tokens=0)


def decide(
    rollouts: Sequence[Rollout],
    *,
    run_id: str,
    manifest_digest: str,
    slot: int,
    policy: Policy,
    environments: Sequence[Environment],
    spec: RunSpec,
) -> Verdict:
    """The verdict on what was read from one submission, in the order of section 7; never raises."""
    (verdict,) = decide_many(
        [Claim(slot=slot, rollouts=rollouts)],
        run_id=run_id,
        manifest_digest=manifest_digest,
        policy=policy,
        environments=environments,
        spec=spec,
    )
    return verdict


def decide_many(
    claims: Sequence[Claim],
    *,
    run_id: str,
    manifest_digest: str,
    policy: Policy,
    environments: Sequence[Environment],
    spec: RunSpec,
) -> list[Verdict]:
    """A verdict for each claim on slots of one policy, with as few forward passes as their tokens need.

    A claim's verdict does not depend on the claims beside it: a failure while several are measured together
    is nobody's, and they are then measured one by one.
    """
    bench = _Bench(run_id, manifest_digest, policy, environments, spec)
    verdicts = [_guarded(partial(_checked, claim, bench), tokens=claim.tokens) for claim in claims]
    passed = [index for index, verdict in enumerate(verdicts) if verdict is None]
    measured = _measured([claims[index] for index in passed], bench)
    for index, result in zip(passed, measured, strict=True):
        claim = claims[index]
        verdicts[index] = _guarded(partial(_judged, claim, result, bench), tokens=claim.tokens)
    return [verdict for verdict in verdicts if verdict is not None]


def _checked(claim: Claim, bench: _Bench) -> None:
    """Everything that needs no model."""
    check_rollouts(claim.rollouts, expected=bench.expected(claim.slot), spec=bench.spec)


def _measured(claims: Sequence[Claim], bench: _Bench) -> list[Measured | Refusal | VerifierFailed]:
    """What the prefill says of each claim, or why it says nothing."""
    try:
        return list(measure_many(bench.policy, [claim.rollouts for claim in claims], spec=bench.spec))
    except VerifierFailed as error:
        if len(claims) == 1:
            return [error]
        logger.warning("measuring %d submissions together failed, now one by one: %s", len(claims), error)
    return [result for claim in claims for result in _measured([claim], bench)]


def _judged(claim: Claim, measured: Measured | Refusal | VerifierFailed, bench: _Bench) -> Verdict:
    if isinstance(measured, Exception):
        raise measured
    finding = judge(measured.figures, limits=bench.spec.limits)
    if finding is not None:
        return Verdict(
            outcome=Outcome.REJECTED,
            reason=finding.reason,
            finding=finding,
            detail=f"Row {finding.row}: {finding.figure} is {finding.value:.6g}, the limit is {finding.limit:.6g}.",
            figures=worst(measured.figures),
            tokens=claim.tokens,
        )
    return Verdict(
        outcome=Outcome.ADMITTED,
        figures=worst(measured.figures),
        rewards=tuple(_rewards(claim, bench)),
        tokens=claim.tokens,
        rollouts=list(claim.rollouts),
        logprobs=measured.logprobs,
    )


def _rewards(claim: Claim, bench: _Bench) -> Iterator[float]:
    environment, problem = bench.problem(claim.slot)
    for rollout in claim.rollouts:
        reward = environment.reward(problem, render_completion(bench.policy, rollout.completion_ids))
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
        return Verdict(outcome=Outcome.REJECTED, reason=refusal.reason, detail=refusal.detail, tokens=tokens)
    except VerifierFailed as error:
        logger.exception("could not verify a submission")
        kind = type(error.__cause__ or error).__name__
        return Verdict(outcome=Outcome.INDETERMINATE, reason=Reason.VERIFIER_FAILED, detail=f"{kind}.", tokens=tokens)
