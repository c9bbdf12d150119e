"""What tests of the verifier share: policies in memory, verdicts of them, and completions decoded without an engine."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.engines.base import Engine, SampleRequest
from node.policy.file import Policy, save_policy
from node.policy.reading import OpenPolicy
from node.protocol.admission import Verdict
from node.protocol.reasons import Refusal
from node.protocol.run import RunSpec
from node.protocol.sampling import gumbel_noise
from node.protocol.submission import Expected, Rollout
from node.submission.reader import VerifierFailed
from node.verification.deviations import RowMeasured
from node.verification.judge import JudgedClaim
from node.verification.measure import Measurement, PolicyUnavailable
from node.verification.plan import Claim, Rules
from node.verification.prefill import TransformersPrefill
from node.verification.proofs import build_proofs
from node.verification.verify import decide_many


@dataclass
class InMemory:
    """`node.verification.measure.Policies` of policies by version; notes which were asked to measure."""

    policies: Mapping[int, Policy]
    measured: list[int] = field(default_factory=list)

    async def blueprint(self, version: int) -> Policy:
        if version not in self.policies:
            raise PolicyUnavailable(f"policy {version} is away")
        return self.policies[version]

    async def prefill(self, version: int) -> TransformersPrefill:
        self.measured.append(version)
        return TransformersPrefill(await self.blueprint(version))

    async def file(self, version: int) -> OpenPolicy:
        policy = await self.blueprint(version)
        with tempfile.TemporaryDirectory() as folder:
            save_policy(policy.model, policy.tokenizer, Path(folder) / "policy")
            return OpenPolicy(Path(folder) / "policy")


def generated(engine: Engine, path: Path, requests: Sequence[SampleRequest], *, version: int) -> list[Rollout]:
    """What `engine` draws with the policy in `path` as version `version`; it is closed afterwards."""

    async def generate() -> list[Rollout]:
        await engine.load(path, version=version)
        try:
            return await engine.generate(requests)
        finally:
            await engine.close()

    return asyncio.run(generate())


def judged(
    claims: Sequence[Claim],
    policies: Mapping[int, Policy] | InMemory,
    *,
    rules: Rules,
    published: Collection[int] | None = None,
    **draws: Any,
) -> list[JudgedClaim]:
    """The judgements of `claims`; `published` is by default what there is, `draws` as of `decide_many`.

    A PolicyUnavailable is raised.
    """
    shelf = policies if isinstance(policies, InMemory) else InMemory(policies)
    known = shelf.policies if published is None else published
    results = asyncio.run(decide_many(claims, policies=shelf, published=known, rules=rules, **draws))
    found = []
    for result in results:
        if isinstance(result, PolicyUnavailable):
            raise result
        found.append(result)
    return found


def decided(claims: Sequence[Claim], policies: Mapping[int, Policy] | InMemory, **arguments: Any) -> list[Verdict]:
    """The verdicts alone, as `judged`."""
    return [one.verdict for one in judged(claims, policies, **arguments)]


def measured(policies: Mapping[int, Policy], rollouts: Sequence[Rollout], *, spec: RunSpec) -> list[RowMeasured]:
    """What `policies` say of one group, row by row; a Refusal or VerifierFailed is raised."""
    (result,) = measured_many(policies, [rollouts], spec=spec)
    if isinstance(result, Exception):
        raise result
    return result


def measured_many(
    policies: Mapping[int, Policy], groups: Sequence[Sequence[Rollout]], *, spec: RunSpec
) -> list[list[RowMeasured] | Exception]:
    """The same of several groups together, or what is in its way."""
    measuring = Measurement(groups, spec=spec)
    for version in measuring.versions:
        measuring.measure(TransformersPrefill(policies[version]), version)
    found: list[list[RowMeasured] | Exception] = []
    for group in range(len(groups)):
        try:
            found.append(list(measuring.result(group).values()))
        except (Refusal, VerifierFailed) as error:
            found.append(error)
    return found


Part = tuple[int, Policy, int | None]
"""A version, its policy, and how many tokens it draws (None: to the end)."""


@torch.inference_mode()
def drawn(parts: Sequence[Part], expected: Expected, seed: bytes, *, spec: RunSpec) -> Rollout:
    """An honest completion that `parts` draw one after the other, each reading the whole prefix anew.

    Plain transformers without a cache, the protocol's noise from its reference: nothing of any engine.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    lengths: list[int] = []
    proofs: list[bytes] = []
    for version, policy, most in parts:
        states: list[Tensor] = []
        while (most is None or len(states) < most) and not _is_over(tokens, policy, spec):
            ids = torch.tensor([[*expected.prompt_ids, *tokens]])
            output = policy.model(input_ids=ids, output_hidden_states=True, use_cache=False)
            scaled = output.logits[0, -1].float() / spec.sampling.temperature
            noise = gumbel_noise([seed], [len(tokens)], vocabulary=policy.vocabulary)
            tokens.append(int((scaled + torch.from_numpy(noise)[0]).argmax()))
            logprobs.append(float(scaled.log_softmax(-1)[tokens[-1]]))
            states.append(output.hidden_states[-1][0, -1])
        if states:
            versions.append(version)
            lengths.append(len(states))
            chunks = list(torch.split(torch.stack(states).bfloat16(), spec.proofs.chunk_tokens))
            proofs += build_proofs(chunks, [seed] * len(chunks), spec=spec.proofs)
    return Rollout(
        seed=seed,
        prompt_ids=list(expected.prompt_ids),
        completion_ids=tokens,
        logprobs=logprobs,
        segment_versions=versions,
        segment_tokens=lengths,
        proofs=proofs,
    )


def _is_over(tokens: Sequence[int], policy: Policy, spec: RunSpec) -> bool:
    return len(tokens) == spec.sampling.max_new_tokens or bool(tokens and tokens[-1] in policy.eos_ids)


@torch.inference_mode()
def forged(
    segments: Sequence[tuple[int, Policy, int]],
    prompt_ids: Sequence[int],
    tokens: Sequence[int],
    *,
    seed: bytes,
    spec: RunSpec,
) -> Rollout:
    """Any completion in any segments (version, policy, tokens), with that policy's true log-probabilities and proofs.

    The best that somebody can do who holds every policy and lies about nothing but who drew what.
    """
    logprobs: list[float] = []
    proofs: list[bytes] = []
    at = 0
    for _, policy, count in segments:
        ids = torch.tensor([[*prompt_ids, *tokens[: at + count]]])
        output = policy.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        rows = slice(len(prompt_ids) - 1 + at, len(prompt_ids) - 1 + at + count)
        scaled = output.logits[0, rows].float() / spec.sampling.temperature
        chosen = torch.tensor(tokens[at : at + count])[:, None]
        logprobs += scaled.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
        chunks = list(torch.split(output.hidden_states[-1][0, rows].bfloat16(), spec.proofs.chunk_tokens))
        proofs += build_proofs(chunks, [seed] * len(chunks), spec=spec.proofs)
        at += count
    return Rollout(
        seed=seed,
        prompt_ids=list(prompt_ids),
        completion_ids=list(tokens),
        logprobs=logprobs,
        segment_versions=[version for version, _, _ in segments],
        segment_tokens=[count for _, _, count in segments],
        proofs=proofs,
    )
