"""An environment that runs in a process of its own, as the rest of a node uses it.

How messages become text, and how a policy's turn becomes a message, is the run's chat format's to say, so it happens
here: the process knows messages, or texts where it has no messages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from node.chat.errors import ChatError
from node.chat.render import render, render_reply
from node.chat.turns import reads_calls, turn_of
from node.environments.base import Environment, EnvironmentFault, Problem, draws
from node.environments.isolated.messages import (
    CalledTool,
    ChatMessage,
    Kind,
    Load,
    Loaded,
    ProblemAnswer,
    ProblemQuery,
    ReplyAnswer,
    ReplyQuery,
    RewardAnswer,
    RewardQuery,
    TurnMessage,
)
from node.environments.isolated.process import GuestProcess
from node.environments.python_tool import in_format
from node.protocol.chat import ChatFormat
from node.protocol.chat_formats import CHAT_FORMATS
from node.protocol.environment_spec import Argument, EnvironmentSpec, ProblemsSpec, ToolSpec

log = logging.getLogger(__name__)

_KINDS: Final[Mapping[str, Kind]] = {"reasoning_gym:": "reasoning_gym", "verifiers:": "verifiers"}


class Isolated:
    """An environment of one turn."""

    def __init__(self, name: str, process: GuestProcess, loaded: Loaded, chat: ChatFormat, *, seeded: bool) -> None:
        self.name = name
        self._process, self._loaded, self._chat, self._seeded = process, loaded, chat, seeded
        self._tools = [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in loaded.tools]

    def problem(self, index: int) -> Problem:
        """Return problem `index`; raises EnvironmentFault.

        Where problems are counted, it is number `index` mod count; where a 32-bit seed makes them, the one drawn for
        `index`.
        """
        if self._seeded:
            index = next(draws(self.name, index)) >> 32
        number = index if self._loaded.problems is None else index % self._loaded.problems
        answer = self._process.ask(ProblemQuery(index=number), ProblemAnswer)
        messages = [message.as_openai() for message in answer.messages]
        data = {"number": number}
        if self._loaded.speaks == "text":
            return Problem(answer.prompt, data, messages=messages)
        try:
            prompt, opening = render(messages, self._chat, tools=self._tools)
        except ChatError as error:
            raise self._refused(error) from error
        return Problem(prompt, data, opening=opening, messages=messages)

    def reward(self, problem: Problem, completion: str) -> float:
        return self._reward(problem, [completion])

    def _reward(self, problem: Problem, turns: Sequence[str]) -> float:
        query = RewardQuery(index=problem.data["number"], turns=self._turns(turns))
        return self._process.ask(query, RewardAnswer).reward

    def _turns(self, turns: Sequence[str]) -> tuple[str | TurnMessage, ...]:
        if self._loaded.speaks == "text":
            return tuple(turns)
        return tuple(
            _message(turn_of(text, self._chat, number=number, tools=bool(self._tools)))
            for number, text in enumerate(turns)
        )

    def _refused(self, error: ChatError) -> EnvironmentFault:
        return EnvironmentFault(f"{self.name}: {error}", code="refused_environment")


class IsolatedConversation(Isolated):
    """An environment of several turns, with or without tools; a `Conversation`."""

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        query = ReplyQuery(index=problem.data["number"], turns=self._turns(turns))
        answer = self._process.ask(query, ReplyAnswer)
        if self._loaded.speaks == "text":
            return answer.text
        return None if answer.messages is None else self._rendered(answer.messages)

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        return self._reward(problem, turns)

    def _rendered(self, messages: Sequence[ChatMessage]) -> str:
        try:
            return render_reply([message.as_openai() for message in messages], self._chat)
        except ChatError as error:
            raise self._refused(error) from error


def load_isolated(spec: EnvironmentSpec, command: Sequence[str], chat: ChatFormat | None) -> Environment:
    """Load the environment of `spec` in the process that `command` starts, and return it with its chat format.

    `chat` is the run's; without one, the argument `chat` of an environment of verifiers names its own.
    Raises EnvironmentFault: bad_arguments, package_missing, environment_missing, refused_environment,
    environment_failed, needs_bound, needs_network, and those of `GuestProcess.ask`.
    """
    return environment_over(GuestProcess(spec.name, command, load_of(spec)), spec, chat)


def load_of(spec: EnvironmentSpec) -> Load:
    """Return the first query of the process of an environment."""
    kind, target = _kind_of(spec.name)
    arguments = {key: value for key, value in spec.arguments.items() if (kind, key) != ("verifiers", "chat")}
    bound = spec.problems.count if isinstance(spec.problems, ProblemsSpec) else None
    return Load(kind=kind, target=target, arguments=arguments, bound=bound)


def environment_over(process: GuestProcess, spec: EnvironmentSpec, chat: ChatFormat | None) -> Environment:
    """Return the environment of `spec` that answers in `process`; raises as `load_isolated`."""
    kind, _ = _kind_of(spec.name)
    shown = _shown(spec.name, spec.arguments.get("chat") if kind == "verifiers" else None, chat)
    loaded = process.start()
    count = "endless" if loaded.problems is None else str(loaded.problems)
    rows = "" if loaded.digest is None else f", digest {loaded.digest}"
    versions = ", ".join(
        f"{name} {known}" for name, known in msgspec.structs.asdict(loaded.versions).items() if known is not None
    )
    log.info("%s is loaded: %s problems%s (%s)", spec.name, count, rows, versions)
    if loaded.tools and not reads_calls(shown):
        process.close()
        raise EnvironmentFault(
            f"{spec.name}: it has tools, and calls are read as JSON between <tool_call> and </tool_call> only, which "
            "this run's chat format does not write",
            code="refused_environment",
        )
    cls = IsolatedConversation if loaded.several_turns else Isolated
    environment = cls(spec.name, process, loaded, shown, seeded=kind == "reasoning_gym")
    environment.problem(0)
    if loaded.speaks == "text":
        return in_format(environment, spec, chat)
    if isinstance(spec.tool, ToolSpec):
        raise EnvironmentFault(f"{spec.name} speaks messages of its own, and takes no tool", code="bad_arguments")
    return environment


def _kind_of(name: str) -> tuple[Kind, str]:
    for prefix, kind in _KINDS.items():
        if name.startswith(prefix):
            return kind, name.removeprefix(prefix)
    return "plain", name


def _shown(name: str, named: Argument | None, chat: ChatFormat | None) -> ChatFormat:
    if named is None:
        return chat or CHAT_FORMATS["plain"]
    if chat is not None:
        raise EnvironmentFault(
            f"{name}: the run's sampling.chat says how messages become text; leave the argument chat out",
            code="bad_arguments",
        )
    if named not in ("plain", "chatml"):
        raise EnvironmentFault(f"{name}: the argument chat is plain or chatml, not {named!r}", code="bad_arguments")
    return CHAT_FORMATS[str(named)]


def _message(turn: Mapping[str, Any]) -> TurnMessage:
    calls = (
        CalledTool(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in turn.get("tool_calls", ())
    )
    return TurnMessage(content=turn["content"], tool_calls=tuple(calls))
