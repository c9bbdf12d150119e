"""Connect an environment, which speaks text, to a policy, which reads and writes token ids."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from node.environments.base import Conversation, Environment, EnvironmentFault, Problem
from node.environments.grading import grade
from node.policy.file import Blueprint, render_completion, render_reply
from node.protocol.run import SamplingSpec
from node.protocol.turns import MAX_REPLY_CHARACTERS, AskReply, turns_of

REPLY_SECONDS = 20.0
"""Time limit for the environment's replies in one submission: a third of a verifier's claim on it."""


def asking(policy: Blueprint, environment: Environment, problem: Problem, *, sampling: SamplingSpec) -> AskReply | None:
    """Return the function that asks `environment` for its reply; None where a run has one turn or it has no replies.

    The function raises MalformedPolicy, and what the environment raises.
    """
    if sampling.max_turns == 1 or not isinstance(environment, Conversation):
        return None

    def ask(turns: Sequence[Sequence[int]]) -> list[int] | None:
        said = environment.reply(problem, [render_completion(policy, list(turn)) for turn in turns])
        if said is None or len(said) > MAX_REPLY_CHARACTERS:
            return None
        return render_reply(policy, said)

    return ask


def in_time(ask: AskReply, *, seconds: float = REPLY_SECONDS) -> AskReply:
    """Wrap `ask` so that it raises EnvironmentFault (too_slow) once its calls have taken `seconds` in all.

    A call under way is not interrupted: hostile text may make one slow, but not a second one.
    """
    spent = 0.0

    def asked(turns: Sequence[Sequence[int]]) -> Sequence[int] | None:
        nonlocal spent
        if spent >= seconds:
            raise EnvironmentFault(f"its replies to one submission took {spent:.1f} s", code="too_slow")
        began = time.monotonic()
        said = ask(turns)
        spent += time.monotonic() - began
        return said

    return asked


def all_graded(
    policy: Blueprint,
    environment: Environment,
    problem: Problem,
    completions: Sequence[Sequence[int]],
    *,
    seconds: float = REPLY_SECONDS,
) -> Iterator[float]:
    """Yield the reward of each completion, as `graded`; raise EnvironmentFault (too_slow) after `seconds` in all."""
    began = time.monotonic()
    for tokens in completions:
        spent = time.monotonic() - began
        if spent >= seconds:
            raise EnvironmentFault(f"the rewards of one submission took {spent:.1f} s", code="too_slow")
        yield graded(policy, environment, problem, tokens)


def graded(policy: Blueprint, environment: Environment, problem: Problem, tokens: Sequence[int]) -> float:
    """Return the reward of one completion; raise MalformedPolicy, and what the environment raises."""
    turns = [render_completion(policy, turn) for turn in turns_of(tokens, policy.eos_ids)]
    return grade(environment, problem, turns, tokens=len(tokens))
