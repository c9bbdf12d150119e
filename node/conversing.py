"""Between an environment of several turns, which speaks text, and a policy, which reads and writes token ids."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from node.environments.base import Conversation, Environment, EnvironmentFault, Problem
from node.environments.grading import grade
from node.policy import Blueprint, render_completion, render_reply
from node.protocol.run import SamplingSpec
from node.protocol.turns import MAX_REPLY_CHARACTERS, AskReply, turns_of

REPLY_SECONDS = 20.0
"""What the replies in one submission may take a verifier: a claim is a verifier's own for three times as long."""


def asking(policy: Blueprint, environment: Environment, problem: Problem, *, sampling: SamplingSpec) -> AskReply | None:
    """What stands for `environment` while a completion is drawn or replayed; None where it has nothing to say.

    What is returned raises MalformedPolicy, and what the environment raises.
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
    """`ask` until it has taken `seconds` in all; then it raises EnvironmentFault (too_slow).

    What a stranger wrote may take an environment long. It is not interrupted, but not asked again either.
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
    """The rewards of completions of one problem, as `graded`; EnvironmentFault (too_slow) after `seconds` in all."""
    began = time.monotonic()
    for tokens in completions:
        spent = time.monotonic() - began
        if spent >= seconds:
            raise EnvironmentFault(f"the rewards of one submission took {spent:.1f} s", code="too_slow")
        yield graded(policy, environment, problem, tokens)


def graded(policy: Blueprint, environment: Environment, problem: Problem, tokens: Sequence[int]) -> float:
    """The reward of a completion; raises MalformedPolicy, and what the environment raises."""
    turns = [render_completion(policy, turn) for turn in turns_of(tokens, policy.eos_ids)]
    return grade(environment, problem, turns, tokens=len(tokens))
