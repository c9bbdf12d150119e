"""What claimed submissions are to a verifier: how many at once, claims to judge, groups to train on, ids in logs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

from coordinator.storage.verdicts import QueueItem
from coordinator.training.group_size import MAX_CHOICE_BYTES
from coordinator.training.groups import Group, Sample
from coordinator.verifier.evidence import EvidenceLimits, encode_evidence, kept_tokens
from node.policy.file import Blueprint, render_completion, render_tokens
from node.protocol.admission import Outcome, Verdict
from node.protocol.reasons import Reason
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout
from node.runtime.logs import bound
from node.verification.judge import JudgedClaim
from node.verification.plan import Claim

log = logging.getLogger(__name__)

SUBMISSIONS_AT_ONCE, SMALL_SUBMISSIONS_AT_ONCE = 8, 32
TOKENS_AT_ONCE = 64 * 1024
"""The most of more submissions than SUBMISSIONS_AT_ONCE: a claim and a commit take as long as judging small ones."""


def submissions_at_once(spec: RunSpec) -> int:
    """Return how many submissions are judged together, by the most tokens that a run's rules allow each.

    No more than SUBMISSIONS_AT_ONCE where an environment may take its time for each.
    """
    sampling = spec.sampling
    if spec.has_packages or sampling.reply_tokens:
        return SUBMISSIONS_AT_ONCE
    tokens = sampling.max_prompt_tokens + sampling.group_size * sampling.max_new_tokens
    return min(max(SUBMISSIONS_AT_ONCE, TOKENS_AT_ONCE // tokens), SMALL_SUBMISSIONS_AT_ONCE)


def log_context(claimed: QueueItem) -> AbstractContextManager[None]:
    """Add the submission's ids to what is logged in the block."""
    return bound(submission=claimed.submission, node=claimed.node, policy=claimed.version, slot=claimed.slot)


def given_up(claimed: QueueItem) -> JudgedClaim:
    """Judge a submission whose verifiers all ended, or lost their claims, before they had a verdict."""
    detail = f"None of {claimed.attempts} verifiers that claimed it came to a verdict."
    with log_context(claimed):
        log.error("submission %s… is given up: %s See the logs of that time", claimed.submission[:16], detail)
    return JudgedClaim(
        verdict=Verdict(outcome=Outcome.INDETERMINATE, reason=Reason.VERIFIER_FAILED, detail=detail, tokens=0)
    )


def claim_of(claimed: QueueItem, rollouts: Sequence[Rollout]) -> Claim:
    """Return what the submission claims, for `node.verification`."""
    return Claim(
        version=claimed.version,
        manifest_digest=claimed.manifest_digest,
        slot=claimed.slot,
        candidate=claimed.candidate or 0,
        rollouts=rollouts,
        full=claimed.full,
    )


def group_of(claimed: QueueItem, judgement: JudgedClaim, *, spec: RunSpec) -> Group:
    """Return what is trained on of an admitted submission.

    In float32 a trainer chooses the experts that the verifier's prefill chose, so that none are kept; nor are those of
    a policy with more choices than a group has room for.
    """
    most = 0 if spec.model.dtype == "float32" else MAX_CHOICE_BYTES * spec.sampling.most_tokens
    experts = tuple(one if len(one) <= most else b"" for one in judgement.experts)
    samples = tuple(
        Sample(
            prompt_ids=tuple(rollout.prompt_ids),
            completion_ids=tuple(rollout.completion_ids),
            logprobs=tuple(logprobs),
            segments=tuple(zip(rollout.segment_versions, rollout.segment_tokens, strict=True)),
            replies=replies,
        )
        for rollout, logprobs, replies in zip(
            judgement.rollouts, judgement.logprobs or (), judgement.replies, strict=True
        )
    )
    return Group(
        version=claimed.version,
        rewards=judgement.verdict.rewards or (),
        rollouts=samples,
        experts=experts if any(experts) else (),
    )


def evidence_of(judgement: JudgedClaim, blueprint: Blueprint, *, limits: EvidenceLimits, spec: RunSpec) -> bytes | None:
    """Encode the measurements of a group for its submission's page, within `limits`; raises PolicyError.

    None if these keep nothing.
    """
    rollouts = judgement.rollouts
    most = kept_tokens(limits, rows=len(rollouts))
    return encode_evidence(
        rollouts,
        {row: one.deviations for row, one in judgement.rows.items()},
        prompt=render_completion(blueprint, rollouts[0].prompt_ids[: 2 * spec.sampling.max_prompt_tokens]),
        pieces=[render_tokens(blueprint, rollout.completion_ids[:most]) for rollout in rollouts],
        replies=[
            [(before, render_completion(blueprint, list(ids))) for before, ids in said] for said in judgement.replies
        ],
        chunk_tokens=spec.proofs.chunk_tokens,
        limits=limits,
    )
