"""The run.toml of small runs: an untrained policy, one environment, and lengths that take a second."""

from __future__ import annotations


def small_run_toml(name: str, *, steps: int, groups_per_step: int, lease_seconds: float = 8.0) -> str:
    return f"""
name = "{name}"

[model]
initial = "random-tiny"

[[environments]]
name = "reverse"

[sampling]
group_size = 2
max_new_tokens = 12

[batch]
groups_per_step = {groups_per_step}
lease_seconds = {lease_seconds}

[limits]
exponent_mismatches = 4.0
token_margin = 0.001
rollout_margin_mean = 0.0001
logprob_error = 0.001

[training]
steps = {steps}

[broadcast]
"""
