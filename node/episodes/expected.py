"""Derive what a submission must contain; a worker, a verifier and an auditor arrive at the same (section 5)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from node.environments import Environment, Problem
from node.episodes.conversation import asking, turn_rules
from node.policy.file import Blueprint, render_prompt
from node.protocol.run import RunSpec
from node.protocol.slots import group_seeds, slot_problem
from node.protocol.submission import Expected


def expected_of(
    spec: RunSpec,
    policy: Blueprint,
    environments: Sequence[Environment],
    *,
    run_id: str,
    version: int,
    manifest_digest: str,
    slot: int,
    candidate: int = 0,
    published: Collection[int] | None = None,
) -> Expected:
    """Derive what a submission for `slot` of policy `version` must contain.

    Args: `environments` are the run's, in its order. `candidate` selects one of the slot's problems in a run with
    pools. `published` are the versions that segments may name; None leaves that unchecked.
    Raises what the environment raises.
    """
    number, environment, problem = problem_of(
        spec, environments, run_id=run_id, manifest_digest=manifest_digest, slot=slot, candidate=candidate
    )
    sampling = spec.sampling_in(number)
    return Expected(
        version=version,
        published=published,
        prompt_ids=render_prompt(policy, problem.prompt, special_tokens=sampling.special_tokens),
        seeds=group_seeds(spec, run_id=run_id, manifest_digest=manifest_digest, slot=slot),
        vocabulary=policy.vocabulary,
        eos_ids=policy.eos_ids,
        ask=asking(policy, environment, problem, sampling=sampling),
        rules=turn_rules(policy, spec, number),
        max_prompt_tokens=sampling.max_prompt_tokens,
    )


def problem_of(
    spec: RunSpec, environments: Sequence[Environment], *, run_id: str, manifest_digest: str, slot: int, candidate: int
) -> tuple[int, Environment, Problem]:
    """Return the number of the slot's environment, that one of `environments`, and the slot's problem there."""
    drawn = slot_problem(spec, run_id=run_id, manifest_digest=manifest_digest, slot=slot, candidate=candidate)
    environment = environments[drawn.environment]
    return drawn.environment, environment, environment.problem(drawn.problem)
