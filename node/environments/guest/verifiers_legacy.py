"""Replay given turns in an environment of verifiers' old interface (0.1.10 to 0.3.1), as its own rollout would.

The package's rollout talks to a client. Here the turns are given, and the environment's methods are called in the order
of `MultiTurnEnv.rollout`, from the start for every query, so that no state is kept. Messages are dictionaries up to
0.1.10, and objects since.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any, NoReturn

from .adapter import (
    Forbidden,
    Json,
    Turn,
    Unusable,
    digest_of,
    field_of,
    openai_turn,
    plain_message,
    refuse_use,
    versions,
    within_bounds,
)
from .verifiers import distribution_of

MAX_ROWS = 10_000_000
_CLIENTS = frozenset({"openai", "anthropic", "prime_sandboxes"})
_UNSUPPORTED = frozenset(
    {"SandboxEnv", "SandboxMixin", "BrowserEnv", "CliAgentEnv", "MCPEnv", "OpenEnvEnv", "RLMEnv", "EnvGroup"}
)
"""Classes whose rollouts need a service, or (EnvGroup) belong to other environments."""

_CLOCK = "it reads how long something took, which differs between machines"
_RESPONSE = "it reads the model's response itself: its tokens or probabilities, which only one machine has"
_CLIENT = "it calls a model, which is not reproducible"


class LegacyReplay:
    """One environment; the package's methods are coroutines, and run in one event loop."""

    def __init__(self, module: ModuleType, attribute: str, load: Json) -> None:
        moved = importlib.util.find_spec("verifiers.legacy") is not None
        self._package = importlib.import_module("verifiers.legacy" if moved else "verifiers")
        self._module = module.__name__
        self._environment = _make(_find_entry(self._package, module, attribute), load["arguments"])
        _check_supported(self._package, self._environment)
        self._runner = asyncio.Runner()
        self._chat: bool = self._environment.message_type == "chat"
        self._tools = _tools_of(self._environment) if self._chat else []
        self._rows = self._environment.get_dataset()
        self._count = min(len(self._rows), load["bound"] or MAX_ROWS)
        if not 1 <= len(self._rows) <= MAX_ROWS:
            raise Unusable("refused_environment", f"its data set has {len(self._rows)} rows")
        self._normalize: Callable[[Any], Any] | None = None
        if importlib.util.find_spec(f"{self._package.__name__}.utils.message_utils") is not None:
            utils = importlib.import_module(f"{self._package.__name__}.utils.message_utils")
            self._normalize = getattr(utils, "normalize_messages", None)
        self._client = _no_client(self._package) if self._normalize else None
        for number in (signal.SIGINT, signal.SIGTERM):  # the package replaces their handlers
            signal.signal(number, signal.SIG_DFL)

    def loaded(self) -> Json:
        kept = ("prompt", "answer", "info", "task")
        rows = islice(iter(self._rows), self._count)
        return {
            "problems": self._count,
            "several_turns": not isinstance(self._environment, self._package.SingleTurnEnv),
            "speaks": "messages" if self._chat else "text",
            "tools": self._tools,
            "versions": versions("verifiers", distribution_of(self._module)),
            "digest": digest_of({key: row[key] for key in kept if key in row} for row in rows),
        }

    def problem(self, index: int) -> Json:
        prompt = self._input(index)["prompt"]
        return {"messages": [plain_message(each) for each in prompt]} if self._chat else {"prompt": str(prompt)}

    def reply(self, index: int, turns: list[Turn]) -> Json:
        return self._runner.run(self._reply(index, turns))

    def reward(self, index: int, turns: list[Turn]) -> float:
        return self._runner.run(self._reward(index, turns))

    async def _reply(self, index: int, turns: list[Turn]) -> Json:
        state, following = await self._replay(index, turns)
        await self._clean_up(state)
        if following is None:
            return {}
        if not self._chat:
            return {"text": following if isinstance(following, str) else "".join(map(_content, following))}
        return {"messages": [plain_message(each) for each in following]}

    async def _reward(self, index: int, turns: list[Turn]) -> float:
        state, _ = await self._replay(index, turns)
        await self._clean_up(state)
        with self._hidden(state):
            await self._environment.rubric.score_rollout(state)
        return within_bounds(state["reward"])

    def _input(self, row: int) -> dict[str, Any]:
        """Return the row as a rollout gets it, without the None that Arrow fills in for absent message keys."""
        found = dict(self._rows[row])
        info = found.get("info")
        if isinstance(info, dict) and info.keys() & {"tool_defs", "oai_tools"}:
            raise Unusable("refused_environment", f"row {row} has tools of its own, and all rows need the same ones")
        if self._chat:
            try:
                found["prompt"] = [
                    {key: value for key, value in message.items() if value is not None} for message in found["prompt"]
                ]
            except (KeyError, TypeError, AttributeError) as error:
                raise Unusable("refused_environment", f"row {row} has no list of messages") from error
        return found

    async def _replay(self, row: int, turns: Sequence[Turn]) -> tuple[Any, Any]:
        """Return the state after `turns`, and the environment's reply; None if it ended the rollout."""
        environment, failure = self._environment, self._package.Error
        state = await environment.init_state(self._input(row), self._client, "", {})
        state["trajectory_id"] = str(row)
        reply: Any = None
        try:
            with self._hidden(state):
                state = await environment.setup_state(state) or state
                context = self._messages(await environment.get_prompt_messages(state))
            for turn in turns:
                said = self._turn(turn)
                await environment.add_trajectory_step(state, self._step(state, context, said))
                reply = None
                if await environment.is_completed(state):
                    break
                with self._hidden(state):
                    following = self._messages(await environment.get_prompt_messages(state))
                if state.get("final_env_response") is not None:
                    break
                reply = self._suffix(context + said, following)
                context = following
        except failure as error:
            state["error"], reply = error, None
        return state, reply

    def _turn(self, turn: Turn) -> Any:
        if self._chat:
            return self._messages([openai_turn(turn)])
        return turn if self._normalize is None else self._messages([{"role": "assistant", "content": turn}])

    def _messages(self, messages: Any) -> Any:
        return messages if self._normalize is None else self._normalize(messages)

    @staticmethod
    def _suffix(before: Any, following: Any) -> Any:
        if following[: len(before)] != before:
            raise Unusable("refused_environment", "it rewrites earlier messages, which is not supported")
        return following[len(before) :]

    def _step(self, state: Any, prompt: Any, completion: Any) -> dict[str, Any]:
        """Build the package's TrajectoryStep without a client's response."""
        return {
            "prompt": prompt,
            "completion": completion,
            "response": Forbidden(_RESPONSE),
            "tokens": None,
            "reward": None,
            "advantage": None,
            "is_truncated": False,
            "trajectory_id": state["trajectory_id"],
            "extras": {},
        }

    @contextmanager
    def _hidden(self, state: Any) -> Iterator[None]:
        """Hide what differs between machines from the environment's own code; the package's needs it in between."""
        kept = {key: state[key] for key in ("timing", "client") if key in state}
        clock = _ScoringClock(scoring_ms=0.0, total_ms=0.0) if self._normalize is None else Forbidden(_CLOCK)
        state.update({"timing": clock, "client": Forbidden(_CLIENT)})
        try:
            yield
        finally:
            state.update(kept)

    async def _clean_up(self, state: Any) -> None:
        clean_up = getattr(self._environment, "cleanup", None)
        # Up to 0.1.10, `is_completed` cleans up, and the completion is rendered apart.
        await (clean_up or self._environment.render_completion)(state)


class _ScoringClock(dict[str, float]):
    """The times of a state up to 0.1.10, of which scoring itself writes two."""

    def __missing__(self, key: str) -> NoReturn:
        refuse_use(_CLOCK)


def _content(message: Any) -> str:
    return str(field_of(message, "content") or "")


def _no_client(package: ModuleType) -> Any:
    """Return a client that cannot be used, which the package asks for."""
    cls = type("NoClient", (package.Client,), dict.fromkeys(package.Client.__abstractmethods__))
    return object.__new__(cls)


def _find_entry(package: ModuleType, module: ModuleType, attribute: str) -> Callable[..., Any]:
    """Return the factory of the environment."""
    name = module.__name__
    made: Any = getattr(module, attribute or "load_environment", None)
    if attribute and not (isinstance(made, type) and issubclass(made, package.Environment)):
        raise Unusable("refused_environment", f"{name} has no environment class {attribute}")
    if not callable(made):
        raise Unusable("refused_environment", f"{name} has no load_environment, and exports no Taskset in __all__")
    found: Callable[..., Any] = made
    return found


def _make(entry: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return entry(**arguments)
    except Exception as error:
        raise Unusable("environment_failed", f"it does not accept its arguments: {error!r}") from error


def _tools_of(environment: Any) -> list[Json]:
    """Return the tools' schemas: `tool_defs`, which were `oai_tools` up to 0.1.10."""
    tools = getattr(environment, "tool_defs", None) or getattr(environment, "oai_tools", None) or ()
    functions = [field_of(tool, "function") or tool for tool in tools]
    return [
        {
            "name": field_of(function, "name"),
            "description": field_of(function, "description") or "",
            "parameters": field_of(function, "parameters") or {},
        }
        for function in functions
    ]


def _check_supported(package: ModuleType, environment: Any) -> None:
    kinds = {cls.__name__ for cls in type(environment).__mro__}
    if not isinstance(environment, package.MultiTurnEnv) or kinds & _UNSUPPORTED:
        raise Unusable(
            "refused_environment", f"a {type(environment).__name__} defines its own rollouts, or needs a service"
        )
    for rubric in _rubrics(environment.rubric):
        names = {cls.__name__ for cls in type(rubric).__mro__}
        held = [*vars(rubric).values(), *rubric.class_objects.values(), *_closure_values(rubric.funcs)]
        if "JudgeRubric" in names or any(type(each).__module__.partition(".")[0] in _CLIENTS for each in held):
            raise Unusable("refused_environment", "its rubric calls a model or a service, which is not reproducible")
        if any(rubric._is_group_func(func) for func in rubric.funcs):  # noqa: SLF001  (its own test)
            raise Unusable("refused_environment", "its rubric scores the completions of a group against each other")


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    for inner in getattr(rubric, "rubrics", ()):
        yield from _rubrics(inner)


def _closure_values(functions: Sequence[Any]) -> Iterator[object]:
    """Yield the values in the closures of reward functions."""
    for function in functions:
        for cell in getattr(function, "__closure__", None) or ():
            yield cell.cell_contents
