"""A run whose limits are narrow, for attacks on the verifier: its policies, and a slot that is leased for one of them.

The limits are those that fit a float32 policy on one kind of machine, where an honest worker's figures are all but
zero. The policies have random weights, with the last norm scaled up so that their choices are as decided as a trained
one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from verifying import judged

from node.environments import load_environments
from node.episodes.expected import expected_of
from node.policy.file import Policy, load_policy, save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.protocol.admission import Outcome, Verdict
from node.protocol.reasons import Reason
from node.protocol.run import EnvironmentSpec, LimitsSpec, ProofSpec, RunSpec, SamplingSpec
from node.protocol.submission import Expected, Rollout
from node.verification.judge import JudgedClaim
from node.verification.plan import Claim, Rules

RUN_ID, MANIFEST = "12" * 32, "34" * 32
LIMITS = LimitsSpec(
    exponent_mismatches=2.0,
    mantissa_mean=0.05,
    mantissa_median=0.5,
    token_margin=1e-3,
    rollout_margin_mean=1e-4,
    logprob_error=2e-4,
)
FAR_INSIDE = LimitsSpec(
    exponent_mismatches=0.0,
    mantissa_mean=0.01,
    mantissa_median=0.0,
    token_margin=1e-4,
    rollout_margin_mean=1e-5,
    logprob_error=4e-5,
)
"""What honest figures stay within: LIMITS leave at least five times the largest of them."""
SHARPNESS = 8.0


def make_rules(name: str, sampling: SamplingSpec) -> Rules:
    """Of a run of one environment within LIMITS."""
    spec = RunSpec(
        name=name,
        environments=(EnvironmentSpec(name="arithmetic"),),
        sampling=sampling,
        proofs=ProofSpec(scheme="toploc/1"),
        limits=LIMITS,
    )
    return Rules(RUN_ID, spec, load_environments(spec))


def sharp_model(seed: int) -> torch.nn.Module:
    model = make_model(seed=seed)
    with torch.no_grad():
        model.base_model.norm.weight.fill_(SHARPNESS)
    return model


def policy_file(model: torch.nn.Module, folder: Path) -> Path:
    path = folder / "policy.safetensors"
    save_policy(model, make_tokenizer(), path)
    return path


def loaded(path: Path) -> Policy:
    return load_policy(path, dtype=torch.float32)


@dataclass(frozen=True)
class LeasedSlot:
    """Slot `number` of a run, leased for policy `version`, and what the verifier says of submissions for it."""

    rules: Rules
    policies: dict[int, Policy]
    version: int
    number: int

    @property
    def policy(self) -> Policy:
        """The one that the slot is leased for."""
        return self.policies[self.version]

    @cached_property
    def expected(self) -> Expected:
        return expected_of(
            self.rules.spec,
            self.policy,
            self.rules.environments,
            run_id=RUN_ID,
            version=self.version,
            manifest_digest=MANIFEST,
            slot=self.number,
        )

    def claim(self, rollouts: Sequence[Rollout]) -> Claim:
        return Claim(version=self.version, manifest_digest=MANIFEST, slot=self.number, rollouts=rollouts)

    def verdict(self, rollouts: Sequence[Rollout]) -> Verdict:
        return self.judgement(rollouts).verdict

    def judgement(self, rollouts: Sequence[Rollout]) -> JudgedClaim:
        (judgement,) = judged([self.claim(rollouts)], self.policies, rules=self.rules)
        return judgement

    def reason(self, rollouts: Sequence[Rollout]) -> Reason | None:
        verdict = self.verdict(rollouts)
        assert (verdict.reason is None) == (verdict.outcome is Outcome.ADMITTED)
        return verdict.reason
