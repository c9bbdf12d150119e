"""The rules that a plan begins with, and the run.toml that it proposes."""

from __future__ import annotations

import json
from typing import Final

import msgspec
import torch

from coordinator.planning.plan import RunPlan
from coordinator.planning.shape import ModelShape
from coordinator.run.definition import render_environments
from node.protocol.run import EnvironmentSpec, ModelSpec, RunSpec, SamplingSpec, parse_run_toml

CONTEXT: Final = 4096
"""Tokens of a prompt with its completion, where nobody says otherwise."""
GROUP_SIZE: Final = 8
PROMPT_PART: Final = 4
MOST_PROMPT_TOKENS: Final = 1024
RATES: Final = ((1_000_000_000, 1e-6), (50_000_000, 3e-6))
"""Learning rates by the least number of parameters (docs/training.md); smaller policies keep the default."""
SKETCH_STEP_16_BITS: Final = 0.06
LIMITS_16_BITS: Final = {
    "exponent_mismatches": 64.0,
    "token_margin": 3.0,
    "rollout_margin_mean": 0.5,
    "logprob_error": 3.0,
}
"""For policies in 16 bits, until they are calibrated: wide enough for vLLM's honest work of 4 billion parameters on a
GPU (docs/gpu.md), most of which the defaults rejected; so wide that another temperature passes."""


def first_spec(shape: ModelShape, *, initial: str, context: int | None, group_size: int | None) -> RunSpec:
    """Return rules for a run that begins with `initial`; what follows from the machines is fitted later."""
    tokens = context or min(CONTEXT, shape.positions)
    prompt = min(MOST_PROMPT_TOKENS, max(1, tokens // PROMPT_PART))
    spec = RunSpec(
        name=shape.name[:100] or "run",
        environments=(EnvironmentSpec(name="arithmetic"),),
        model=ModelSpec(initial=initial, dtype=shape.dtype),
        sampling=SamplingSpec(
            group_size=group_size or GROUP_SIZE, max_prompt_tokens=prompt, max_new_tokens=max(1, tokens - prompt)
        ),
    )
    rate = next((rate for least, rate in RATES if shape.parameters >= least), spec.training.learning_rate)
    proofs = msgspec.structs.replace(spec.proofs, top_k=min(spec.proofs.top_k, shape.hidden))
    training, limits = msgspec.structs.replace(spec.training, learning_rate=rate), spec.limits
    if getattr(torch, shape.dtype).itemsize < torch.float32.itemsize:
        proofs = msgspec.structs.replace(proofs, sketch_step=SKETCH_STEP_16_BITS)
        limits = msgspec.structs.replace(limits, **LIMITS_16_BITS)
    return msgspec.structs.replace(spec, proofs=proofs, training=training, limits=limits)


def proposed_values(plan: RunPlan) -> tuple[tuple[str, str, str | int | float, str], ...]:
    """Return what run.toml should say: table, key, value, and why."""
    spec, longest = plan.spec, plan.spec.sampling.most_tokens
    slot = plan.work.slot_seconds
    return (
        ("model", "dtype", spec.model.dtype, "as the weights are stored"),
        ("sampling", "group_size", spec.sampling.group_size, "completions of each problem"),
        ("sampling", "max_prompt_tokens", spec.sampling.max_prompt_tokens, "the environment's prompts must fit"),
        ("sampling", "max_new_tokens", spec.sampling.max_new_tokens, f"{longest:,} tokens with the prompt"),
        ("proofs", "top_k", spec.proofs.top_k, f"of {plan.model.hidden:,} hidden units"),
        ("proofs", "sketch_step", spec.proofs.sketch_step, "until it is calibrated"),
        ("batch", "groups_per_step", spec.batch.groups_per_step, f"{plan.work.tokens:,} tokens a step at most"),
        ("batch", "lease_seconds", spec.batch.lease_seconds, f"a planned worker takes {slot:.0f} s for a full group"),
        ("batch", "max_leases_per_node", spec.batch.max_leases_per_node, "twice what it decodes at once, or more"),
        ("limits", "max_submission_bytes", spec.limits.max_submission_bytes, "a full group fits, uncompressed"),
        *(("limits", name, getattr(spec.limits, name), "until it is calibrated") for name in LIMITS_16_BITS),
        (
            "training",
            "learning_rate",
            spec.training.learning_rate,
            f"for {plan.model.parameters / 1e9:.2g} billion parameters",
        ),
    )


def render_run_toml(plan: RunPlan) -> str:
    """Render a commented run.toml that parses to the plan's spec; all other values stay the defaults."""
    lines = [
        "# Proposed by `swarmproof plan`; docs/run-toml.md explains every key. Calibrate the limits",
        "# before strangers join: `swarmproof calibrate --help`.",
        f"name = {json.dumps(plan.spec.name)}",
        "",
        render_environments(plan.spec.environments),
    ]
    table = ""
    for section, key, value, why in proposed_values(plan):
        if section != table:
            lines += ["", f"[{section}]"]
            if section == "model":
                lines.append(f"initial = {json.dumps(plan.spec.model.initial)}")
        table = section
        lines.append(f"{f'{key} = {json.dumps(value)}':<38}# {why}")
    text = "\n".join(lines) + "\n"
    if parse_run_toml(text) != plan.spec:
        raise AssertionError("the proposed run.toml is not the planned run")
    return text
