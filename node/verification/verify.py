"""Verify submissions: plan (`plan`), measure (`measure`) and judge (`judge`) until there is a verdict on each.

A worker's input raises nothing here. Failures on this side (out of memory, a broken policy, a bug) end in an
indeterminate verdict, never in a rejection; a missing policy ends in no verdict (`PolicyUnavailable`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from node.environments.base import EnvironmentFault
from node.policy.file import Blueprint
from node.protocol.admission import Outcome, Verdict
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout
from node.submission.reader import VerifierFailed, read_rollouts
from node.verification.judge import (
    Due,
    JudgedClaim,
    Measurements,
    NeedsGain,
    NeedsRewards,
    NeedsRows,
    judge_claim,
    refused,
)
from node.verification.measure import (
    Measurement,
    Policies,
    PolicyUnavailable,
    as_verifier_failure,
    measure_rewards,
)
from node.verification.plan import Claim, Look, Plan, Probe, Rules, look_if_suspicious, plan_claim
from node.verification.prefill import KeptContexts, Prefill
from node.verification.readings import keeping
from node.verification.second_look import suspect_gain

logger = logging.getLogger(__name__)

_Judging = Generator[int, "Prefill | PolicyUnavailable", None]


async def verify(
    body: bytes | Path,
    *,
    version: int,
    manifest_digest: str,
    slot: int,
    candidate: int = 0,
    policies: Policies,
    published: Collection[int],
    rules: Rules,
    probe: Probe = secrets.randbelow,
    look: Look | None = None,
) -> JudgedClaim:
    """Judge a submission as it arrived; arguments as of `Claim` and `decide_many`. Raises PolicyUnavailable."""
    rollouts = await asyncio.to_thread(read, body, spec=rules.spec)
    if isinstance(rollouts, Verdict):
        return JudgedClaim(verdict=rollouts)
    claim = Claim(version=version, manifest_digest=manifest_digest, slot=slot, candidate=candidate, rollouts=rollouts)
    (found,) = await decide_many([claim], policies=policies, published=published, rules=rules, probe=probe, look=look)
    if isinstance(found, PolicyUnavailable):
        raise found
    return found


def read(body: bytes | Path, *, spec: RunSpec) -> list[Rollout] | Verdict:
    """Read the rollouts of a submission as it arrived; return the verdict if it cannot be read. Blocks."""
    try:
        with as_verifier_failure("reading"):
            return read_rollouts(body, spec=spec)
    except Refusal as refusal:
        return refused(refusal)
    except VerifierFailed as error:
        return undecided(error)


async def decide_many(
    claims: Sequence[Claim],
    *,
    policies: Policies,
    published: Collection[int],
    rules: Rules,
    probe: Probe = secrets.randbelow,
    look: Look | None = None,
) -> list[JudgedClaim | PolicyUnavailable]:
    """Judge each claim, or return the policy that it could not be measured under.

    `published` are the versions that the run has published so far, from the one before the oldest claim's on. Only
    the policies that drew something in a claim which passed every check without a model are asked for, one after the
    other, and claims share their forward passes. A claim's verdict does not depend on the claims beside it: a failure
    while several are measured together is nobody's, and they are then measured one by one.

    `probe` draws the row of each claim that is measured first. Where that row alone is over a limit, it is the
    verdict's finding and the others cost nothing. By default nobody can foresee it, so that one honest row among
    invented ones does not buy a prefill of them. `look` says which groups that would pass get a second look; None is
    the run's own rule.
    """
    cases = [_Case(claim) for claim in claims]
    for case in cases:
        await case.fetch_blueprint(policies)

    def plan(case: _Case) -> None:
        own_look = look_if_suspicious(random.SystemRandom().random()) if look is None else look
        case.start(partial(plan_claim, rules=rules, published=published, probe=probe, look=own_look))

    # In one thread until it needs a policy: each change of threads takes a tenth of a millisecond of processor time.
    judging = _judging(cases, plan, spec=rules.spec)
    version = await asyncio.to_thread(next, judging, None)
    while version is not None:
        version = await asyncio.to_thread(_continue, judging, await _prefill_of(version, policies))
    for case in cases:
        await case.finish(policies, published)
    return [case.state for case in cases if isinstance(case.state, JudgedClaim | PolicyUnavailable)]


def undecided(error: VerifierFailed, *, tokens: int = 0) -> Verdict:
    """Log `error` and return the indeterminate verdict.

    Only the error's type is public, and the code of an environment's: its text may hold paths.
    """
    logger.error("could not verify a submission", exc_info=error)
    cause = error.__cause__ or error
    detail = f"EnvironmentFault: {cause.code}." if isinstance(cause, EnvironmentFault) else f"{type(cause).__name__}."
    return Verdict(outcome=Outcome.INDETERMINATE, reason=Reason.VERIFIER_FAILED, detail=detail, tokens=tokens)


async def _prefill_of(version: int, policies: Policies) -> Prefill | PolicyUnavailable:
    try:
        return await policies.prefill(version)
    except PolicyUnavailable as error:
        return error


def _continue(judging: _Judging, found: Prefill | PolicyUnavailable) -> int | None:
    """Let `judging` go on with the policy that it asked for; return the next one, None once it is done. Blocks."""
    try:
        return judging.send(found)
    except StopIteration:
        return None


def _judging(cases: Sequence[_Case], plan: Callable[[_Case], None], *, spec: RunSpec) -> _Judging:
    """Plan, measure and judge the claims, and compute their rewards; yield each policy that is needed, to be sent it.

    Blocks in between. A policy is used until another one is asked for, and not held beside that.
    """
    for case in cases:
        plan(case)
    contexts, newest_first = KeptContexts(), False
    at_hand: int | None = None
    found: Prefill | PolicyUnavailable | None = None
    while due := [(case, case.state.rows) for case in cases if isinstance(case.state, NeedsRows)]:
        measuring = _measurement_of([(case.plan, rows) for case, rows in due], spec=spec)
        for version in sorted(measuring.versions, reverse=newest_first):
            if not measuring.waiting(version):
                continue
            if version != at_hand:
                at_hand = found = None
                found = yield version
            if isinstance(found, PolicyUnavailable):
                for group in measuring.waiting(version):
                    measuring.fail(group, found)
            elif found is not None:
                at_hand = version
                measuring.measure(keeping(found, contexts), version)
        _take_rows([case for case, _ in due], measuring)
        # The policy that was asked last is still at hand: what comes next begins with it.
        newest_first = not newest_first
    _reward(cases)


def _measurement_of(wanted: Sequence[tuple[Plan, Sequence[int]]], *, spec: RunSpec) -> Measurement:
    """Return the measurement, to be made, of these rows of each plan's claim."""
    return Measurement(
        [plan.claim.rollouts for plan, _ in wanted],
        spec=spec,
        rows=[rows for _, rows in wanted],
        replies=[plan.replies for plan, _ in wanted],
    )


def _take_rows(cases: Sequence[_Case], measuring: Measurement) -> None:
    for group, case in enumerate(cases):
        case.take_rows(measuring, group)


def _reward(cases: Sequence[_Case]) -> None:
    for case in cases:
        case.reward()


@dataclass
class _Case:
    """A claim in progress; `state` is the judgement, the missing policy, or the measurement needed next."""

    claim: Claim
    blueprint: Blueprint | None = None
    plan: Plan = field(init=False)
    seen: Measurements = field(default_factory=Measurements)
    state: Due | JudgedClaim | PolicyUnavailable = field(init=False)

    async def fetch_blueprint(self, policies: Policies) -> None:
        """Get the leased policy's blueprint, for `start`."""
        try:
            self.blueprint = await policies.blueprint(self.claim.version)
        except PolicyUnavailable as error:
            self.state = error

    def start(self, plan: Callable[[Claim, Blueprint], Plan]) -> None:
        """Plan the claim under its leased policy, if that could be had; blocks."""
        if self.blueprint is None:
            return
        with self._settle_failure():
            self.plan = plan(self.claim, self.blueprint)
            self._judge()

    def take_rows(self, measuring: Measurement, group: int) -> None:
        """Judge again with this case's measurements, which are those of `group`."""
        with self._settle_failure():
            self._judge(rows={**self.seen.rows, **measuring.result(group)})

    def reward(self) -> None:
        """Compute the rewards, if they are what is missing, and judge again; blocks."""
        with self._settle_failure():
            if isinstance(self.state, NeedsRewards):
                self._judge(rewards=measure_rewards(self.plan))

    async def finish(self, policies: Policies, published: Collection[int]) -> None:
        """Measure and judge until the case is settled."""
        while not isinstance(self.state, JudgedClaim | PolicyUnavailable):
            with self._settle_failure():
                match self.state:
                    case NeedsRows():
                        raise RuntimeError("rows are measured for all cases together")
                    case NeedsRewards():
                        raise RuntimeError("rewards are computed for all cases together")
                    case NeedsGain(suspect):
                        gain = await suspect_gain(
                            suspect,
                            self.claim.rollouts,
                            self.plan.replies,
                            version=self.claim.version,
                            policies=policies,
                            published=published,
                            spec=self.plan.rules.spec,
                        )
                        self._judge(gains={**self.seen.gains, suspect: gain})

    def _judge(self, **measured: Any) -> None:
        self.seen = replace(self.seen, **measured)
        found = judge_claim(self.plan, self.seen)
        rollouts, replies, rows = self.claim.rollouts, self.plan.replies, self.seen.rows
        self.state = (
            JudgedClaim(verdict=found, rollouts=rollouts, replies=replies, rows=rows)
            if isinstance(found, Verdict)
            else found
        )

    @contextlib.contextmanager
    def _settle_failure(self) -> Iterator[None]:
        """Settle the case on a failure in the block: a Refusal is the sender's fault, all else ours."""
        tokens = self.claim.tokens
        try:
            with as_verifier_failure("verification"):
                yield
        except PolicyUnavailable as error:
            self.state = error
        except Refusal as refusal:
            self.state = JudgedClaim(verdict=refused(refusal, tokens=tokens), rollouts=self.claim.rollouts)
        except VerifierFailed as error:
            self.state = JudgedClaim(verdict=undecided(error, tokens=tokens), rollouts=self.claim.rollouts)
