"""The reward of a rollout, whatever kind of environment it is of: what everybody calls who computes one."""

from __future__ import annotations

from collections.abc import Sequence

from node.environments.base import Conversation, Environment, Problem
from node.environments.lengths import LengthTargets


def grade(environment: Environment, problem: Problem, turns: Sequence[str], *, tokens: int) -> float:
    """The reward in [0, 1] of what the model wrote: its `turns` in order, at least one, of `tokens` tokens together.

    A conversation sees all turns, another environment the last, which is its only one. Raises what the
    environment raises.
    """
    if isinstance(environment, LengthTargets):
        earned = grade(environment.inner, problem.data["asked"], turns, tokens=tokens)
        return environment.after_penalty(earned, problem, tokens=tokens)
    if isinstance(environment, Conversation):
        return environment.reward_turns(problem, turns)
    return environment.reward(problem, turns[-1])
