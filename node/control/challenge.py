"""Evaluation of a challenge's answer: speed and correctness of the node.

The answer must pass a submission's checks, so tokens per second are those of the run's policy under forced sampling. It
does not prove that the node's own machine generated them, only that the node could have it done in that time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.environments import NO_DATASETS, load_environments
from node.episodes.expected import expected_of
from node.protocol.challenge import CHALLENGE_SLOT, challenge_manifest, challenge_spec
from node.protocol.control import AskChallenge, ChallengeBody
from node.protocol.reasons import Refusal
from node.protocol.run import RunSpec
from node.protocol.slots import group_seeds
from node.protocol.submission import Expected, Rollout, check_rollouts
from node.submission.reader import read_rollouts
from node.verification.judge import find_excess
from node.verification.measure import Measurement
from node.verification.prefill import Prefill

ANY_VOCABULARY = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ChallengeResult:
    """Result of a challenge. `measured` says whether it was checked against a policy; `fault` is the first

    thing wrong with the answer, or None.
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
    datasets: Mapping[str, Path] = NO_DATASETS,
) -> ChallengeResult:
    """Check an answer that took `seconds`: against `prefill`'s policy, or only its form without one; blocks.

    `datasets` are the files of the run's datasets, by digest, which the prompt of a check against a policy needs.
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
                load_environments(rules, datasets),
                run_id=run_id,
                version=body.version,
                manifest_digest=manifest,
                slot=CHALLENGE_SLOT,
            )
            check_rollouts(rollouts, expected=expected, spec=rules)
            _measure(rollouts, prefill, rules, version=body.version)
    except Refusal as refusal:
        fault = f"{refusal.reason}: {refusal.detail}"
    return ChallengeResult(body.version, ask.samples, tokens, seconds, prefill is not None, fault)


def _formal(rollouts: Sequence[Rollout], rules: RunSpec, *, version: int, seeds: Sequence[bytes]) -> Expected:
    """Return the expectation without a policy: prompt and end-of-sequence tokens are taken from the answer."""
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
    """Measure and judge as a verifier does; raises Refusal."""
    measuring = Measurement([rollouts], spec=rules)
    measuring.measure(prefill, version)
    finding = find_excess(measuring.result(0), limits=rules.limits)
    if finding is not None:
        raise Refusal(finding.reason, finding.sentence)
