"""Verification of a real policy's groups, from bytes to verdict, against the machine's matrix products.

The groups are honest: the product's own engine draws them. Second looks are left out, since they are a share of groups.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks import workload
from benchmarks.report import say
from benchmarks.sizing.machine import matmul_rate, synchronize
from benchmarks.workload import HeldPolicies, WorkloadVerifier
from coordinator.calibration.sketch_step import error_of
from node.engines.base import requests_for
from node.engines.device import find_device
from node.engines.torch import TorchEngine
from node.policy.file import Policy, load_policy
from node.policy.skeleton import unique_tensors
from node.protocol.admission import Outcome
from node.protocol.run import RunSpec, parse_run_toml
from node.protocol.submission import Rollout
from node.submission.writer import write_rollouts
from node.verification.measure import Measurement
from node.verification.prefill import TransformersPrefill


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """A policy file, its run's run.toml, and how many groups are verified, where and with how many threads."""

    policy: Path
    run_toml: str
    groups: int
    threads: int
    device: str = "cpu"


def measure(task: VerifyTask) -> dict[str, Any]:
    """Draw groups, verify each, and return the figures; the first group warms up."""
    torch.set_num_threads(task.threads)
    spec = parse_run_toml(task.run_toml)
    rules = workload.make_rules(replace(spec, limits=replace(spec.limits, suspects=(), second_looks=0.0)))
    dtype = getattr(torch, spec.model.dtype)
    drawn = asyncio.run(_draw(task, rules))
    policy = load_policy(task.policy, dtype=dtype, device=find_device(task.device))
    verifier = WorkloadVerifier(rules, HeldPolicies({0: TransformersPrefill(policy)}, {0: task.policy}))
    rates = {each: matmul_rate(each, device=task.device) for each in {dtype, torch.float32}}
    shares, tokens_per_s, rejected = [], [], 0
    for slot, rollouts in enumerate(drawn):
        body = write_rollouts(rollouts)
        synchronize(task.device)
        started = time.perf_counter()
        verdict = asyncio.run(verifier.verdict(body, slot=slot))
        seconds = time.perf_counter() - started
        rejected += verdict.outcome is not Outcome.ADMITTED
        shares.append(floor_seconds(rollouts, policy, rates) / seconds)
        tokens_per_s.append(verdict.tokens / seconds)
        say(f"verify {slot}: {verdict.outcome} {verdict.detail} {seconds:.2f} s, {shares[-1]:.3f} of the products")
    return {
        "verify_share_of_matmul_peak": statistics.median(shares[1:]),
        "verified_tokens_per_s": statistics.median(tokens_per_s[1:]),
        f"matmul_gflop_per_s_{spec.model.dtype}": rates[dtype] / 1e9,
        "verify_groups_rejected": rejected,
        "honest_deviation": deviation(drawn, policy, spec),
    }


def deviation(drawn: list[list[Rollout]], policy: Policy, spec: RunSpec) -> float:
    """Return how far a projection of the groups' states is off, relative to a state's root mean square."""
    measuring = Measurement(drawn, spec=spec)
    measuring.measure(TransformersPrefill(policy), 0)
    rows = [row for group in range(len(drawn)) for row in measuring.result(group).values()]
    distances = [distance for row in rows for distance in row.deviations.sketch_distances]
    return error_of(distances, step=spec.proofs.sketch_step)


async def _draw(task: VerifyTask, rules: Any) -> list[list[Rollout]]:
    engine = TorchEngine(rules.spec, device=find_device(task.device), threads=task.threads)
    await engine.load(task.policy, version=0)
    drawn = []
    for slot in range(task.groups + 1):
        started = time.perf_counter()
        drawn.append(await engine.generate(requests_for(workload.expected(rules, engine.policy, slot))))
        tokens = sum(len(rollout.completion_ids) for rollout in drawn[-1])
        say(f"verify: {tokens} tokens of slot {slot} drawn, {tokens / (time.perf_counter() - started):.1f} a second")
    await engine.close()
    return drawn


def floor_seconds(rollouts: list[Rollout], policy: Policy, rates: dict[torch.dtype, float]) -> float:
    """Return what the products of a group's prefill take at the machine's best: layers in the policy's dtype.

    Layers: 2 operations for each weight and token of the group, its prompt once. The head: 2 for each weight and
    drawn token, summed in float32 as the protocol has it; at the rate of float32, unless this CPU sums products of the
    dtype so.
    """
    # Its llvmlite in the main module would break the processes of vLLM for the CPU, which look at every loaded module.
    from node.policy.bfloat16 import PackedStates  # noqa: PLC0415

    layers = sum(tensor.numel() for name, tensor in unique_tensors(policy.model).items() if ".layers." in name)
    drawn = sum(len(rollout.completion_ids) for rollout in rollouts)
    in_layers = 2.0 * layers * (len(rollouts[0].prompt_ids) + drawn) / rates[policy.model.dtype]
    head = policy.head.weight
    kind = torch.float32 if PackedStates.of(head[:1], head) is None else head.dtype
    return in_layers + 2.0 * policy.vocabulary * policy.hidden * drawn / rates[kind]
