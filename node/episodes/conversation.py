"""Connect an environment, which speaks text, to a policy, which reads and writes token ids."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from node.chat.turns import is_thinking
from node.environments.base import REPLY_SECONDS, Conversation, Environment, EnvironmentFault, Problem
from node.environments.grading import grade
from node.policy.file import Blueprint, render_completion, render_reply
from node.protocol.chat import ChatFormat
from node.protocol.environment_spec import ThinkingSpec
from node.protocol.run import RunSpec, SamplingSpec
from node.protocol.turns import (
    MAX_REPLY_CHARACTERS,
    RUN_RULES,
    AskReply,
    StopStrings,
    ThinkingBudget,
    TurnRules,
    turns_of,
)


def turn_rules(policy: Blueprint, spec: RunSpec, environment: int) -> TurnRules:
    """Return what `spec.environments[environment]` adds to the run's rules of turns, with the policy's tokenizer.

    Raises MalformedPolicy, and so do its functions.
    """
    own, chat = spec.environments[environment], spec.sampling.chat

    def decode(tokens: Sequence[int]) -> str:
        return render_completion(policy, list(tokens))

    stop = StopStrings(own.stop, decode) if isinstance(own.stop, tuple) else None
    thinking = None
    if isinstance(own.thinking, ThinkingSpec):
        thinking = ThinkingBudget(
            tokens=own.thinking.tokens,
            end_ids=tuple(render_reply(policy, own.thinking.end)),
            is_open=lambda tokens: is_thinking(decode(tokens), chat if isinstance(chat, ChatFormat) else None),
        )
    return TurnRules(spec.sampling_in(environment).max_new_tokens, stop, thinking)


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
        ids = render_reply(policy, said)
        if isinstance(sampling.chat, ChatFormat) and turns[-1][-1] not in policy.eos_ids:
            # What the format writes between messages begins behind an end mark, and a stop string is none.
            ids.insert(0, policy.end_mark)
        return ids

    return ask


def in_time(ask: AskReply) -> AskReply:
    """Wrap `ask` so that it raises EnvironmentFault (too_slow) once its calls have taken REPLY_SECONDS in all.

    A call under way is not interrupted: hostile text may make one slow, but not a second one.
    """
    spent = 0.0

    def asked(turns: Sequence[Sequence[int]]) -> Sequence[int] | None:
        nonlocal spent
        if spent >= REPLY_SECONDS:
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
    rules: TurnRules = RUN_RULES,
) -> Iterator[float]:
    """Yield the reward of each completion, as `graded`; raise EnvironmentFault (too_slow) after REPLY_SECONDS in all.

    The environment's time alone counts: a long group takes a while to be split, which is nobody's doing.
    """
    texts = [_texts_of(policy, tokens, rules) for tokens in completions]
    began = time.monotonic()
    for tokens, turns in zip(completions, texts, strict=True):
        spent = time.monotonic() - began
        if spent >= REPLY_SECONDS:
            raise EnvironmentFault(f"the rewards of one submission took {spent:.1f} s", code="too_slow")
        yield grade(environment, problem, turns, tokens=len(tokens))


def graded(
    policy: Blueprint,
    environment: Environment,
    problem: Problem,
    tokens: Sequence[int],
    *,
    rules: TurnRules = RUN_RULES,
) -> float:
    """Return the reward of one completion under `rules`; raise MalformedPolicy, and what the environment raises."""
    return grade(environment, problem, _texts_of(policy, tokens, rules), tokens=len(tokens))


def _texts_of(policy: Blueprint, tokens: Sequence[int], rules: TurnRules) -> list[str]:
    return [render_completion(policy, turn) for turn in turns_of(tokens, policy.eos_ids, rules)]
