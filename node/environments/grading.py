"""Grade rollouts of any kind of environment: the one entry point for computing a reward."""

from __future__ import annotations

from collections.abc import Sequence

from node.environments.base import Environment, Problem, is_conversation
from node.environments.lengths import LengthTargets


def grade(environment: Environment, problem: Problem, turns: Sequence[str], *, tokens: int) -> float:
    """Return the reward in [0, 1] of the model's `turns`, at least one, of `tokens` tokens in total.

    A conversation sees all turns, another environment only the last. Raises what the environment raises.
    """
    if isinstance(environment, LengthTargets):
        earned = grade(environment.inner, problem.data["asked"], turns, tokens=tokens)
        return environment.after_penalty(earned, problem, tokens=tokens)
    if is_conversation(environment):
        return environment.reward_turns(problem, turns)
    return environment.reward(problem, turns[-1])
