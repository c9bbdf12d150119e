"""The tool `python` for any environment of one turn: the model writes code, and is told what the code says.

A turn with a call is answered; one without is the answer, which the environment judges. Nothing is kept between turns:
for each reply the code of all calls so far is run once more in one sandbox, so that worker, verifier and auditor come
to the same words by themselves (docs/adr/0035-python-tool.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from node.chat.render import render_reply
from node.chat.turns import reads_calls, turn_of
from node.environments.base import Conversation, Environment, EnvironmentFault, Problem
from node.environments.chat import Chat, with_chat
from node.protocol.chat import ChatFormat
from node.protocol.environment_spec import END_OF_THOUGHT, EnvironmentSpec, ToolSpec
from node.sandbox import Sandbox
from node.sandbox.cells import run_cells
from node.sandbox.root import PYTHON_VERSION

NAME: Final = "python"
DEFINITION: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Run Python code. Returns what it prints, and the value of its last expression. "
        "Names stay defined from call to call. There are no files, no network and no packages.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    },
}
"""What a model is told of the tool (docs/protocol.md, section 5.2)."""

NO_CALL: Final = 'ToolError: a call is {"name": "python", "arguments": {"code": "..."}}'


@dataclass(frozen=True, slots=True)
class PythonTool:
    """The tool without a chat format, for models of single characters: a turn without `</think>` is code as it is."""

    inner: Environment
    tool: ToolSpec

    @property
    def name(self) -> str:
        return self.inner.name

    def problem(self, index: int) -> Problem:
        return self.inner.problem(index)

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:  # noqa: ARG002  (the tool does not depend on the problem)
        if END_OF_THOUGHT in turns[-1]:
            return None
        cells = tuple(turn.strip() for turn in turns if END_OF_THOUGHT not in turn)
        return _run(cells, self.tool)[0] + "\n"

    def reward(self, problem: Problem, completion: str) -> float:
        return self.inner.reward(problem, completion)

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        return self.reward(problem, turns[-1])


@dataclass(frozen=True, slots=True)
class ChatPythonTool(Chat):
    """The tool in a chat format: calls are those of the format, and each of a turn has a result of its own."""

    tool: ToolSpec

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return (DEFINITION,)

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:  # noqa: ARG002  (the tool does not depend on the problem)
        """Return the results of the last turn's calls as tool's messages; None where it makes none."""
        *earlier, last = (self._calls(turn, number) for number, turn in enumerate(turns))
        if not last:
            return None
        codes = [code for _, code in last if code is not None]
        cells = (*(code for calls in earlier for _, code in calls if code is not None), *codes)
        outputs = iter(_run(cells, self.tool, wanted=len(codes)) if codes else ())
        results = [
            {"role": "tool", "name": NAME, "tool_call_id": call, "content": NO_CALL if code is None else next(outputs)}
            for call, code in last
        ]
        return render_reply(results, self.chat)

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        return self.reward(problem, turns[-1])

    def _calls(self, turn: str, number: int) -> list[tuple[str, str | None]]:
        """Return the id of each call of a turn, and its code; None for a call of something else."""
        made = turn_of(turn, self.chat, number=number, tools=True).get("tool_calls", ())
        return [(call["id"], _code(call["function"])) for call in made]


def in_format(environment: Environment, spec: EnvironmentSpec, chat: ChatFormat | None) -> Environment:
    """Return `environment` in the run's chat format, with the tool of `spec` if it has one; raises as `with_tool`."""
    tool = spec.tool
    return with_tool(environment, tool, chat) if isinstance(tool, ToolSpec) else with_chat(environment, chat)


def with_tool(environment: Environment, tool: ToolSpec, chat: ChatFormat | None) -> Conversation:
    """Give `environment`, which has no chat format yet, the tool and the run's chat format.

    Raises EnvironmentFault (bad_arguments) for an environment that has several turns of its own, or a format whose
    calls are not read.
    """
    if isinstance(environment, Conversation):
        raise EnvironmentFault(f"{environment.name} has turns of its own, and takes no tool", code="bad_arguments")
    if chat is None:
        return PythonTool(environment, tool)
    if not is_callable_in(chat):
        raise EnvironmentFault(
            f"{environment.name} has a tool, which sampling.chat has no place for, or calls it otherwise than by JSON "
            "between <tool_call> and </tool_call>",
            code="bad_arguments",
        )
    return ChatPythonTool(environment, chat, tool)


def is_callable_in(chat: ChatFormat) -> bool:
    """Tell whether a chat format tells of tools, has results, and writes calls as they are read."""
    return reads_calls(chat) and chat.openings.tools is not None and chat.results is not None


def check_tool(tool: ToolSpec) -> None:
    """Raise EnvironmentFault (python_version) or SandboxFailed where this machine cannot run the tool's code."""
    if tool.python != PYTHON_VERSION:
        raise EnvironmentFault(
            f"this run's tool is Python {tool.python}, but this is Python {PYTHON_VERSION}", code="python_version"
        )
    Sandbox().check()


def _run(cells: tuple[str, ...], tool: ToolSpec, *, wanted: int = 1) -> tuple[str, ...]:
    return run_cells(cells, wanted=wanted, steps=tool.steps, characters=tool.characters)


def _code(function: Mapping[str, str]) -> str | None:
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return None
    code = arguments.get("code") if isinstance(arguments, dict) else None
    return code if function["name"] == NAME and isinstance(code, str) else None
