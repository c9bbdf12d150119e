"""A leased slot, and what dishonest workers send for it: by the real engine, by a rule of choice, or forged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from narrow_run import LeasedSlot, loaded, make_rules
from torch import Tensor
from verifying import forged, generated

from node.engines.base import SampleRequest
from node.engines.torch import TorchEngine
from node.policy.file import Policy
from node.protocol.run import SamplingSpec
from node.protocol.sampling import gumbel_noise
from node.protocol.submission import Expected, Rollout

SLOT, VERSION = 7, 5
RULES = make_rules("cheating", SamplingSpec(group_size=4, max_new_tokens=40))
SPEC = RULES.spec

Chooser = Callable[[Tensor, Tensor], int]
"""From one position's scaled logits and noise, both [vocabulary], to a token."""


@dataclass(frozen=True)
class Bench(LeasedSlot):
    """The slot, and the file of the run's policy."""

    path: Path

    @property
    def requests(self) -> list[SampleRequest]:
        return [SampleRequest(tuple(self.expected.prompt_ids), seed) for seed in self.expected.seeds]

    def forged(self, completions: Sequence[Sequence[int]]) -> list[Rollout]:
        """Any completions, with the policy's true log-probabilities and true proofs: the best a colluder can do."""
        return [
            forge(self.policy, self.expected.prompt_ids, tokens, seed=seed)
            for tokens, seed in zip(completions, self.expected.seeds, strict=True)
        ]

    def chosen(self, choose: Chooser) -> list[list[int]]:
        """Completions by `choose` in place of the forced choice."""
        return [decode(self.policy, self.expected, seed, choose) for seed in self.expected.seeds]


def forge(policy: Policy, prompt_ids: Sequence[int], tokens: Sequence[int], *, seed: bytes) -> Rollout:
    return forged([(VERSION, policy, len(tokens))], prompt_ids, tokens, seed=seed, spec=SPEC)


@torch.inference_mode()
def decode(policy: Policy, expected: Expected, seed: bytes, choose: Chooser) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < SPEC.sampling.max_new_tokens and not (tokens and tokens[-1] in policy.eos_ids):
        ids = torch.tensor([[*expected.prompt_ids, *tokens]])
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, -1].float()
        noise = torch.from_numpy(gumbel_noise([seed], [len(tokens)], vocabulary=policy.vocabulary))[0]
        tokens.append(choose(logits, noise))
    return tokens


def engine_rollouts(path: Path, requests: Sequence[SampleRequest]) -> list[Rollout]:
    """What the real engine returns with the policy in `path` loaded."""
    return generated(TorchEngine(SPEC), path, requests, version=VERSION)


def bench_of(path: Path) -> Bench:
    return Bench(RULES, {VERSION: loaded(path)}, VERSION, SLOT, path)


def relabelled(rollouts: Sequence[Rollout], bench: Bench) -> list[Rollout]:
    """Somebody's rollouts under the slot's own prompt and seeds."""
    return [
        msgspec.structs.replace(one, seed=seed, prompt_ids=list(bench.expected.prompt_ids))
        for one, seed in zip(rollouts, bench.expected.seeds, strict=True)
    ]
