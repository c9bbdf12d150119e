"""Whether an environment is the same everywhere: ask processes as different as machines are, and compare."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Final, TypeVar

from node.environments.base import REPLY_SECONDS, Conversation, EnvironmentFault, Problem
from node.environments.isolated.environment import load_isolated
from node.environments.isolated.process import GUEST_VARIABLES
from node.protocol.environment_spec import EnvironmentSpec
from node.protocol.turns import MAX_REPLY_CHARACTERS

T = TypeVar("T")
MakeCommand = Callable[[Mapping[str, str]], Sequence[str]]

SLOW_SECONDS: Final = 0.5
"""A verifier asks for each completion of a submission, and waits 20 s for all of them."""

OTHERS: Final[Sequence[Mapping[str, str]]] = (
    MappingProxyType({}),
    MappingProxyType({"PYTHONHASHSEED": "1", "TZ": "Asia/Kolkata", "OMP_NUM_THREADS": "2"}),
    MappingProxyType({"PYTHONHASHSEED": "4242", "TZ": "America/St_Johns", "LANG": "C", "LC_ALL": "C"}),
)
"""What is other than usual in each process."""

COMPLETIONS: Final = (
    "",
    "</think>42",
    "<think>Let me see.</think>\n\n\\boxed{42}",
    "<answer>yes</answer>",
    '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>',
    "\x00\u202e\ufffd 👩‍🔬 " * 20,
    "[[[{{{" * 2000,
    "9" * 5000,
)
"""Turns that no policy has been trained for, as those of a first step are."""


@dataclass(slots=True)
class _Said:
    """What one process said, by question: its answers, its failures, and the seconds of answers that took long."""

    answers: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)

    def note(self, question: str, ask: Callable[[], T]) -> T | None:
        """Return the answer to a question, and note it; None where it failed, too."""
        began = time.monotonic()
        try:
            answer = ask()
        except EnvironmentFault as fault:
            self.faults[question] = str(fault)
            return None
        seconds = time.monotonic() - began
        if seconds > SLOW_SECONDS:
            self.slow[question] = seconds
        self.answers[question] = answer.prompt if isinstance(answer, Problem) else repr(answer)
        return answer


def check(make_command: MakeCommand, spec: EnvironmentSpec, *, problems: int) -> list[str]:
    """Return, a sentence each, what would make `spec` differ between nodes or fail on them, by its first `problems`.

    `make_command` returns the command of a process with the environment variables that it is given. Raises
    EnvironmentFault where the environment cannot be loaded at all.
    """
    said = [_interview(make_command({**GUEST_VARIABLES, **others}), spec, problems=problems) for others in OTHERS]
    return [*_differences(said), *_failures(said[0])]


def _interview(command: Sequence[str], spec: EnvironmentSpec, *, problems: int) -> _Said:
    environment, said = load_isolated(spec, command, None), _Said()
    for index in range(problems):
        problem = said.note(f"problem {index}", partial(environment.problem, index))
        if problem is None:
            continue
        for number, completion in enumerate(COMPLETIONS):
            what = f"completion {number} of problem {index}"
            said.note(f"the reward of {what}", partial(environment.reward, problem, completion))
            if isinstance(environment, Conversation):
                _converse(environment, problem, [completion, *COMPLETIONS[1:3]], said, what)
    return said


def _converse(environment: Conversation, problem: Problem, texts: list[str], said: _Said, what: str) -> None:
    count = 0
    for count in range(1, len(texts) + 1):
        question = f"the reply to turn {count} after {what}"
        reply = said.note(question, partial(environment.reply, problem, texts[:count]))
        if reply is None:
            break
        if len(reply) > MAX_REPLY_CHARACTERS:
            said.faults[question] = (
                f"it has {len(reply)} characters, and more than {MAX_REPLY_CHARACTERS} end a rollout"
            )
    said.note(f"the reward of all turns after {what}", partial(environment.reward_turns, problem, texts[:count]))


def _differences(said: Sequence[_Said]) -> Iterator[str]:
    """Yield the first question of each kind on which the processes differ; the others follow from the same cause."""
    first, seen = said[0], set[str]()
    for others, other in zip(OTHERS[1:], said[1:], strict=True):
        for question, answer in first.answers.items():
            kind = re.sub(r"[0-9]+", "", question)
            if other.answers.get(question) != answer and kind not in seen:
                seen.add(kind)
                settings = ", ".join(f"{name}={value}" for name, value in others.items())
                here, there = _short(answer), _short(other.answers.get(question))
                yield (
                    f"{question} is {here} in one process, and {there} in another with {settings}: let it depend on no "
                    "order of a set, hash, clock, locale, random state or thread"
                )


def _failures(said: _Said) -> Iterator[str]:
    if said.faults:
        question, fault = next(iter(said.faults.items()))
        yield (
            f"{len(said.faults)} questions failed, the first of them {question} ({fault}): whatever the model writes, "
            "give it a reward"
        )
    if said.slow:
        question, seconds = max(said.slow.items(), key=lambda item: item[1])
        yield (
            f"{len(said.slow)} answers took more than {SLOW_SECONDS:g} s, {question} {seconds:.1f} s: a verifier waits "
            f"{REPLY_SECONDS:g} s for a whole group"
        )


def _short(text: str | None) -> str:
    return "missing" if text is None else repr(text[:60]) + ("…" if len(text) > 60 else "")
