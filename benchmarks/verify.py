"""Verification throughput over generation throughput, and the cost of hostile submissions over honest ones.

`python -m benchmarks.verify [--json]`. One policy of random weights (125 million by default), one machine. In each
round the engine generates 1, 16 and 64 completions at a time, and then the verifier takes what the 64 became, slot by
slot as it arrives: the file from bytes, every check, the prefill, all figures, the verdict
(`node.verification.verify.verify`). Tokens are completion tokens, prompts come on top for both. Engine and verifier
take turns on the same cores (or the same GPU). Figures are medians over rounds, ratios medians of the rounds' own.

- `verify_over_generate` is against 64 at a time: a worker with the default limits holds up to 8 slots of 8.
- `share_*` is where the verifier's time goes, measured over one more pass with a clock around each part.
- `hostile_cost_over_honest` is the dearest kind of garbage that costs nothing to make, over an honest slot:

      random_bytes        as many as the honest file has
      wrong_prompt        a file of the right shape, invented, that answers another slot's prompt
      out_of_range        the same for the right prompt, but for its very last token id
      random_proofs       the same with valid token ids; its proofs are random bytes
      invented_proofs     the same, with proofs of random hidden states, made once

  Hardly any random bytes decode as a proof. The last kind passes every check that needs no model, so that only a
  prefill can tell it from honest work: that of one row, because a verifier measures one before the others.

The floor: a prefill computes 2 FLOP for each weight (without the embedding) and token, a group's prompt once;
`share_of_matmul_bound` holds the verifier against that, at the speed of one large matrix product measured here.
`layers_over_torch_matmul` is the speed at which a policy's layers compute it over that of torch's kernel
(`node.policy.products`), 1 where the machine has instructions for the dtype. Decoding c rows a step reads
all weights for c tokens: while that reading binds, generation's cost per token is bytes / (c * bandwidth), and the
ratio is large. Once 2 FLOP per weight and row take longer than reading the weight, decoding is bound as prefill is, and
no verifier that repeats the forward pass can be much faster per token. That is so from about c = peak FLOP/s over
bandwidth in weights per second / 2: some tens of rows on a CPU, some hundreds on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.nn import functional

from benchmarks import workload
from benchmarks.timing import Call, median_ratio, rounds_ms, synchronised
from benchmarks.workload import WorkloadVerifier
from node.engines.base import Engine
from node.policy.file import Blueprint
from node.policy.products import multiply
from node.protocol.admission import Outcome, Verdict
from node.protocol.run import RunSpec
from node.protocol.submission import Expected, Rollout, chunk_count, proof_bytes
from node.submission.writer import write_rollouts
from node.verification import spans
from node.verification import verify as verifying
from node.verification.plan import Rules
from node.verification.prefill import TransformersPrefill
from node.verification.proofs import build_proofs

MATMUL_ROWS = 1024


async def timed_verdict(verifier: WorkloadVerifier, body: bytes, *, slot: int) -> tuple[Verdict, float]:
    """Judge `body`; return the verdict, and the seconds that it took."""
    start = time.perf_counter()
    verdict = await verifier.verdict(body, slot=slot)
    return verdict, time.perf_counter() - start


def invention(wanted: Expected, spec: RunSpec, rng: random.Random, proof: Callable[[], bytes]) -> list[Rollout]:
    """Make a group of the right shape that no policy drew; `proof` makes one proof."""
    tokens = spec.sampling.max_new_tokens
    chunks = chunk_count([tokens], chunk_tokens=spec.proofs.chunk_tokens)
    allowed = [token for token in range(wanted.vocabulary) if token not in wanted.eos_ids]
    return [
        Rollout(
            seed=seed,
            prompt_ids=list(wanted.prompt_ids),
            completion_ids=rng.choices(allowed, k=tokens),
            logprobs=[-rng.random() * 12 for _ in range(tokens)],
            segment_versions=[wanted.version],
            segment_tokens=[tokens],
            proofs=[proof() for _ in range(chunks)],
        )
        for seed in wanted.seeds
    ]


def garbage(wanted: Expected, other: Expected, spec: RunSpec, *, size: int, hidden: int, seed: int) -> dict[str, bytes]:
    """Make a file of each kind for the slot of `wanted`; `other` is another slot's, `size` an honest file's."""
    rng = random.Random(seed)
    states = torch.randn(spec.proofs.chunk_tokens, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    (fixed,) = build_proofs([states], [bytes(16)], spec=spec.proofs)

    def random_proof() -> bytes:
        return rng.randbytes(proof_bytes(spec.proofs, tokens=spec.proofs.chunk_tokens))

    right = invention(wanted, spec, rng, random_proof)
    stray = msgspec.structs.replace(right[-1], completion_ids=[*right[-1].completion_ids[:-1], wanted.vocabulary])
    elsewhere = [msgspec.structs.replace(rollout, prompt_ids=list(other.prompt_ids)) for rollout in right]
    return {
        "random_bytes": rng.randbytes(size),
        "wrong_prompt": write_rollouts(elsewhere),
        "out_of_range": write_rollouts([*right[:-1], stray]),
        "random_proofs": write_rollouts(right),
        "invented_proofs": write_rollouts(invention(wanted, spec, rng, lambda: fixed)),
    }


@dataclass(frozen=True)
class Round:
    """Result of a round: tokens per second by concurrency and of the verifier, and seconds per slot by kind."""

    generated: Mapping[int, float]
    verified: float
    seconds: Mapping[str, float]
    bodies: Mapping[int, bytes]


async def generate(engine: Engine, rules: Rules, slots: Sequence[int], count: int) -> tuple[list[Rollout], float]:
    """Draw `count` completions for `slots` together; return them, and tokens per second."""
    requests = workload.slot_requests(rules, engine.policy, slots)[:count]
    start = time.perf_counter()
    rollouts = await engine.generate(requests)
    tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
    return rollouts, tokens / (time.perf_counter() - start)


async def one_round(engine: Engine, verifier: WorkloadVerifier, options: argparse.Namespace, turn: int) -> Round:
    rules, group = verifier.rules, verifier.rules.spec.sampling.group_size
    generated: dict[int, float] = {}
    rollouts: list[Rollout] = []
    slots: list[int] = []
    for index, count in enumerate(options.concurrency):
        # Slots that no round before has seen: their prompts are in no prefix cache.
        first = (turn * len(options.concurrency) + index) * 100
        slots = list(range(first, first + -(-count // group)))
        rollouts, generated[count] = await generate(engine, rules, slots, count)
        workload.say(f"round {turn}: {count} at a time: {generated[count]:.0f} tokens/s generated")
    whole = len(rollouts) // group
    bodies = {slot: write_rollouts(rollouts[at * group : (at + 1) * group]) for at, slot in enumerate(slots[:whole])}
    tokens, spent = 0, 0.0
    for slot, body in bodies.items():
        verdict, seconds = await timed_verdict(verifier, body, slot=slot)
        if verdict.outcome is not Outcome.ADMITTED:
            workload.say(f"an honest slot was rejected: {verdict.detail}")
        tokens, spent = tokens + verdict.tokens, spent + seconds
    workload.say(f"round {turn}: {tokens / spent:.0f} tokens/s verified")
    costs = {"honest": spent / whole}
    slot = slots[0]
    kinds = garbage(
        workload.expected(rules, engine.policy, slot),
        workload.expected(rules, engine.policy, slot + 1),
        rules.spec,
        size=len(bodies[slot]),
        hidden=engine.policy.hidden,
        seed=turn,
    )
    for kind, body in kinds.items():
        verdict, costs[kind] = await timed_verdict(verifier, body, slot=slot)
        if verdict.outcome is not Outcome.REJECTED:
            raise SystemExit(f"{kind} was {verdict.outcome}")
        workload.say(f"round {turn}: {kind}: {verdict.reason}, {costs[kind] / costs['honest']:.3f} of an honest slot")
    return Round(generated, tokens / spent, costs, bodies)


async def shares(verifier: WorkloadVerifier, bodies: Mapping[int, bytes]) -> dict[str, float]:
    """Measure where the verifier's time goes."""
    parts = {
        "read": (verifying, "read_rollouts"),
        "prefill": (TransformersPrefill, "_hidden_states"),
        "logits_and_noise": (spans, "appraise_spans"),
        "noise": (spans, "appraise"),
        "proofs": (spans, "_check_proofs"),
    }
    total = 0.0
    with workload.clocks(parts) as taken:
        for slot, body in bodies.items():
            total += (await timed_verdict(verifier, body, slot=slot))[1]
    logits = taken.pop("logits_and_noise") - taken["noise"]
    parted = dict(taken) | {"logits": logits}
    parted["rest"] = total - sum(parted.values())
    return {f"share_{name}": seconds / total for name, seconds in parted.items()}


def matmul_flops(dtype: torch.dtype, hidden: int) -> dict[str, float]:
    """Return the FLOP per second of one product of the model's own width, by torch's kernel and as a policy's layers
    compute it: the medians of ten.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    states = torch.randn(MATMUL_ROWS, hidden, device=device).to(dtype)
    weight = torch.randn(4 * hidden, hidden, device=device).to(dtype)
    calls: dict[str, Call] = {
        "torch": lambda: functional.linear(states, weight),
        "layers": lambda: multiply(states, weight),
    }
    if device == "cuda":
        calls = {name: synchronised(call) for name, call in calls.items()}
    work = 2 * MATMUL_ROWS * hidden * 4 * hidden
    return {name: work * 1e3 / statistics.median(taken) for name, taken in rounds_ms(calls, 10).items()}


def figures_of(rounds: Sequence[Round], policy: Blueprint, options: argparse.Namespace, prompt: int) -> dict[str, Any]:
    """Compute everything but the shares; `prompt` is the length of a slot's prompt."""
    figures: dict[str, Any] = {"parameters": policy.parameters}
    verified = [each.verified for each in rounds]
    figures["verified_tokens_per_s"] = statistics.median(verified)
    for count in options.concurrency:
        generated = [each.generated[count] for each in rounds]
        figures[f"generated_tokens_per_s_c{count}"] = statistics.median(generated)
        figures[f"verify_over_generate_c{count}"] = median_ratio(verified, generated)
    figures["verify_over_generate"] = figures[f"verify_over_generate_c{options.concurrency[-1]}"]
    honest = [each.seconds["honest"] for each in rounds]
    costs = {
        kind: median_ratio([each.seconds[kind] for each in rounds], honest)
        for kind in rounds[0].seconds
        if kind != "honest"
    }
    figures["honest_slot_seconds"] = statistics.median(honest)
    figures |= {f"cost_over_honest_{kind}": cost for kind, cost in costs.items()}
    figures["hostile_cost_over_honest"] = max(costs.values())
    flops = matmul_flops(getattr(torch, options.dtype), policy.hidden)
    # An embedding is looked up. The layers see a group's prompt as well, the head only what is predicted.
    head = policy.vocabulary * policy.hidden
    layers = policy.parameters - 2 * head
    group_tokens = workload.make_spec(dtype=options.dtype, tokens=options.tokens).sampling.group_size * options.tokens
    per_token = 2 * (layers * (prompt + group_tokens) / group_tokens + head)
    figures["matmul_gflop_per_s"] = max(flops.values()) / 1e9
    figures["share_of_matmul_bound"] = statistics.median(verified) * per_token / max(flops.values())
    figures["layers_over_torch_matmul"] = flops["layers"] / flops["torch"]
    return figures


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures."""
    rules = workload.make_rules(workload.make_spec(dtype=options.dtype, tokens=options.tokens))
    async with workload.running_random(options, rules) as (engine, path):
        verifier = WorkloadVerifier(rules, workload.held(path, dtype=getattr(torch, options.dtype)))
        # The first round warms up.
        rounds = [await one_round(engine, verifier, options, turn) for turn in range(options.rounds + 1)][1:]
        policy = engine.policy
    prompt = len(workload.expected(rules, policy, 0).prompt_ids)
    figures = figures_of(rounds, policy, options, prompt)
    return figures | await shares(verifier, rounds[-1].bodies)


def main() -> None:
    parser = workload.make_parser(__doc__, tokens=64, hidden=768, layers=12)
    workload.add_rounds(parser, rounds=3, concurrency="completions at a time; the last: a worker's")
    options = workload.parse(parser)
    if options.concurrency[-1] < workload.make_spec(dtype=options.dtype, tokens=1).sampling.group_size:
        parser.error("the last --concurrency is at least a group")
    figures = asyncio.run(measure(options))
    costs = {name: value for name, value in figures.items() if name.startswith("cost_over_honest_")}
    notes = {
        "verify_over_generate": f"against {options.concurrency[-1]} completions at a time",
        "hostile_cost_over_honest": f"{max(costs, key=lambda name: costs[name])} is the dearest kind",
    }
    workload.report("verify", options, figures, notes)


if __name__ == "__main__":
    main()
