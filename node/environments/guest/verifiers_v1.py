"""Tasksets of `verifiers.v1`, played by their own `Env.run`: see `verifiers_seat` for the one who plays."""

from __future__ import annotations

import asyncio
import importlib
from itertools import islice
from types import ModuleType
from typing import Any

from .adapter import Json, Turn, Unusable, digest_of, plain_message, versions, within_bounds
from .verifiers import OWN_TASKSETS, distribution_of
from .verifiers_runtime import ScriptRuntime
from .verifiers_seat import Episode, Stage, call_class, check_task
from .verifiers_tools import ToolServers

MAX_TASKS = 10_000_000


class TasksetPlay:
    """One environment: a taskset, its `Env`, and the tools of both."""

    def __init__(self, module: ModuleType, load: Json) -> None:
        self._module = module.__name__
        self._runner = asyncio.Runner()
        v1, env = importlib.import_module("verifiers.v1"), _make_environment(module, load["arguments"])
        _check_seat(v1, env)
        self._tasks = _load_tasks(env.taskset, load["bound"])
        check_task(self._tasks[0])
        shared = ToolServers(type(env.taskset).toolsets(env.taskset.config), shared=True)
        self._stage = Stage(v1, env, type(env.taskset).task_type(), shared, ScriptRuntime(), call_class())
        own = ToolServers(self._stage.task_class.toolsets(self._tasks[0].config))
        self._tools = [*own.schemas(), *shared.schemas()]
        self._runner.run(self._start())

    def loaded(self) -> Json:
        plain_run = type(self._stage.env).run is self._stage.v1.SingleAgentEnv.run
        return {
            "problems": len(self._tasks),
            "several_turns": bool(self._tools) or not plain_run,
            "speaks": "messages",
            "tools": self._tools,
            "versions": versions("verifiers", distribution_of(self._module)),
            "digest": digest_of(task.data.model_dump(mode="json") for task in self._tasks),
        }

    def problem(self, index: int) -> Json:
        asked = self._asked(index, [])
        if asked is None:
            raise Unusable("refused_environment", f"its problem {index} ends before the model has a turn")
        return {"messages": asked}

    def reply(self, index: int, turns: list[Turn]) -> Json:
        asked = self._asked(index, turns)
        return {} if asked is None else {"messages": asked}

    def reward(self, index: int, turns: list[Turn]) -> float:
        episode = Episode(self._stage, index, turns, scored=True)
        self._runner.run(episode.play(self._tasks[index]))
        return within_bounds(episode.reward())

    def _asked(self, index: int, turns: list[Turn]) -> list[Json] | None:
        """Return the messages that the environment sends after `turns`; None where it is done."""
        episode = Episode(self._stage, index, turns, scored=False)
        try:
            self._runner.run(episode.play(self._tasks[index]))
        except BaseException:
            # Whatever the environment made of the end of the turns, such as a group of errors.
            if episode.pending is None:
                raise
        return None if episode.pending is None else [plain_message(message) for message in episode.pending]

    async def _start(self) -> None:
        await self._stage.shared_tools.start()
        await self._stage.env.start()


def _make_environment(module: ModuleType, arguments: Json) -> Any:
    """Return the package's Env for a taskset: arguments are the taskset's, those of `env.` the environment's."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    config: Json = {"taskset": {"id": module.__name__.removeprefix(OWN_TASKSETS)}}
    for key, value in arguments.items():
        path = key.removeprefix("env.").split(".")
        place = config if key.startswith("env.") else config["taskset"]
        for name in path[:-1]:
            place = place.setdefault(name, {}) if isinstance(place, dict) else None
        if path == ["id"] or not isinstance(place, dict):
            raise Unusable("bad_arguments", f"the argument {key!r} names nothing of the environment's")
        place[path[-1]] = value
    try:
        return loaders.load_environment(loaders.resolve_env_config(config))
    except Exception as error:
        raise Unusable("bad_arguments", f"it does not accept its arguments: {error}") from error


def _default_harness(taskset: str) -> str:
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    return str(loaders.default_harness_id(taskset))


def _load_tasks(taskset: Any, bound: int | None) -> list[Any]:
    if taskset.INFINITE and bound is None:
        raise Unusable(
            "needs_bound",
            "its taskset has no end: say in run.toml how many problems are drawn from, as problems = { count = N }",
        )
    tasks = list(islice(iter(taskset), bound or MAX_TASKS + 1))
    if not 1 <= len(tasks) <= MAX_TASKS:
        raise Unusable("refused_environment", f"its taskset has {len(tasks)} tasks")
    return tasks


def _check_seat(v1: ModuleType, env: Any) -> None:
    """Raise Unusable unless one agent plays, which only talks and calls the environment's tools."""
    seats = {name: value for name, value in env.config if isinstance(value, v1.AgentConfig)}
    if len(seats) != 1:
        raise Unusable(
            "refused_environment", f"it has {len(seats)} seats ({', '.join(seats)}), and a run trains one policy"
        )
    (seat,) = seats.values()
    default = _default_harness(env.config.taskset.id)
    pinned = seat.harness.id if seat.harness is not None else default
    if pinned not in ("null", "bash") or (seat.harness is not None and pinned == "bash"):
        raise Unusable("refused_environment", f"its agent runs the program {pinned!r}, and is more than a chat")
    limits = ("max_input_tokens", "max_output_tokens", "max_total_tokens")
    if any(getattr(seat, limit, None) is not None for limit in limits):
        raise Unusable("refused_environment", "its agent has limits of tokens: the run's own are in run.toml")
