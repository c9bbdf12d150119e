"""What the answer to a challenge shows of the node that gave it.

The answer is held to what a verifier holds a submission to, so that tokens a second are those of the run's own policy,
drawn as the run wants them. That the node's own machine drew them, nobody can tell: it is what the node can have done
in that time, by whatever means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from node.environments import load_environment
from node.episodes.expected import expected_of
from node.protocol.challenge import CHALLENGE_SLOT, challenge_manifest, challenge_spec
from node.protocol.control import AskChallenge, ChallengeBody
from node.protocol.reasons import Refusal
from node.protocol.run import RunSpec
from node.protocol.slots import group_seeds
from node.protocol.submission import Expected, Rollout, check_rollouts
from node.submission.reader import read_rollouts
from node.verification.judge import find_excess
from node.verification.measure import Measuring
from node.verification.prefill import Prefill

ANY_VOCABULARY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer shows. `measured` says whether a policy was there to compare it with.

    `fault` is the first thing that is wrong with it, None if there is none.
    """

    version: int
    rows: int
    tokens: int
    seconds: float
    measured: bool
    fault: str | None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def appraise_challenge(
    body: ChallengeBody,
    ask: AskChallenge,
    *,
    spec: RunSpec,
    run_id: str,
    node: bytes,
    nonce: str,
    seconds: float,
    prefill: Prefill | None = None,
) -> Shown:
    """Check an answer that took `seconds`, with a policy ready to measure or, without one, its form alone; blocks.

    Raises VerifierFailed for faults of this side.
    """
    rules, tokens, fault = challenge_spec(spec, ask), 0, None
    manifest = challenge_manifest(run_id=run_id, manifest_digest=body.manifest_digest, node=node, nonce=nonce)
    try:
        rollouts = read_rollouts(body.rollouts, spec=rules)
        tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
        if prefill is None:
            seeds = group_seeds(rules, run_id=run_id, manifest_digest=manifest, slot=CHALLENGE_SLOT)
            check_rollouts(rollouts, expected=_formal(rollouts, rules, version=body.version, seeds=seeds), spec=rules)
        else:
            expected = expected_of(
                rules,
                prefill.blueprint,
                [load_environment(environment) for environment in rules.environments],
                run_id=run_id,
                version=body.version,
                manifest_digest=manifest,
                slot=CHALLENGE_SLOT,
            )
            check_rollouts(rollouts, expected=expected, spec=rules)
            _measure(rollouts, prefill, rules, version=body.version)
    except Refusal as refusal:
        fault = f"{refusal.reason}: {refusal.detail}"
    return Shown(body.version, ask.samples, tokens, seconds, prefill is not None, fault)


def _formal(rollouts: Sequence[Rollout], rules: RunSpec, *, version: int, seeds: Sequence[bytes]) -> Expected:
    """Return what can be expected without a policy: prompt and end-of-sequence tokens are taken from the answer."""
    cap = rules.sampling.max_new_tokens
    short = [rollout.completion_ids for rollout in rollouts if 0 < len(rollout.completion_ids) < cap]
    return Expected(
        version=version,
        published=None,
        prompt_ids=rollouts[0].prompt_ids,
        seeds=seeds,
        vocabulary=ANY_VOCABULARY,
        eos_ids={tokens[-1] for tokens in short},
    )


def _measure(rollouts: Sequence[Rollout], prefill: Prefill, rules: RunSpec, *, version: int) -> None:
    """Raise the Refusal that a verifier would give."""
    measuring = Measuring([rollouts], spec=rules)
    measuring.measure(prefill, version)
    finding = find_excess(measuring.result(0), limits=rules.limits)
    if finding is not None:
        raise Refusal(finding.reason, finding.sentence)
