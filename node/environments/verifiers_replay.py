"""Replay given turns in an environment of the verifiers package, as its own rollout would.

The package's rollout talks to a client. Here the turns are given, and the environment's methods are called in the order
of `MultiTurnEnv.rollout` (verifiers 0.1.10), from the start for every query, so that no state is kept. Used in
`node.environments.verifiers_child` only.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

import numpy as np
from blake3 import blake3

from node.chat.errors import ChatError
from node.chat.render import render, render_reply
from node.chat.turns import reads_calls, turn_of
from node.environments.verifiers_messages import EnvironmentLoaded, Load, RowQuery, RowResult

MAX_ROWS = 10_000_000
log = logging.getLogger(__name__)

_CLIENTS = frozenset({"openai", "anthropic", "prime_sandboxes"})
_UNSUPPORTED = frozenset({"SandboxEnv", "BrowserEnv", "CliAgentEnv", "OpenEnvEnv", "EnvGroup"})
"""Classes whose rollouts need a service, or (EnvGroup) belong to other environments."""


class EnvironmentUnusable(Exception):
    """The environment cannot be used; `code` becomes the EnvironmentFault's."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class VerifiersReplay:
    """One environment; methods are coroutines because the package's are."""

    def __init__(self, load: Load) -> None:
        module, _, attribute = load.target.partition(":")
        self._module = module.replace("-", "_")
        _check_module(self._module)
        self._package = importlib.import_module("verifiers")
        self._format = load.chat
        self._environment = _make(_find_entry(self._package, self._module, attribute), load.arguments)
        _check_supported(self._package, self._environment)
        self._chat: bool = self._environment.message_type == "chat"
        self._tools: list[dict[str, Any]] = list(self._environment.oai_tools or ()) if self._chat else []
        if self._tools and not reads_calls(self._format):
            raise EnvironmentUnusable(
                "refused_environment",
                "it has tools, and calls are read as JSON between <tool_call> and </tool_call> only, which this run's "
                "chat format does not write",
            )
        self._rows = self._environment.get_dataset()

    async def loaded(self) -> EnvironmentLoaded:
        """Describe the environment, after trying one problem and its reward to fail early."""
        if not 1 <= len(self._rows) <= MAX_ROWS:
            raise EnvironmentUnusable("refused_environment", f"its data set has {len(self._rows)} rows")
        await self.answer(RowQuery("problem", 0))
        await self.answer(RowQuery("reward", 0, ("",)))
        return EnvironmentLoaded(
            rows=len(self._rows),
            conversation=not isinstance(self._environment, self._package.SingleTurnEnv),
            messages=self._chat,
            package_version=metadata.version("verifiers"),
            environment_version=_version_of(self._module),
            dataset_digest=self._digest(),
            python=".".join(map(str, sys.version_info[:2])),
        )

    async def answer(self, ask: RowQuery) -> RowResult:
        """Answer a query; if the environment raises over the turns, there is no reply and no reward.

        Raises EnvironmentUnusable, OSError, and what the environment's rubric raises beyond the errors it catches
        itself.
        """
        random.seed(ask.row)
        np.random.seed(ask.row % 2**32)
        if ask.what == "problem":
            return self._problem(ask.row)
        try:
            state, reply = await self._replay(ask.row, ask.turns)
        except (EnvironmentUnusable, MemoryError, OSError):
            raise  # not caused by the turns
        except Exception as error:  # noqa: BLE001  (caused by what the model wrote)
            log.warning("row %d: %r", ask.row, error)
            return RowResult()
        if ask.what == "reply":
            return RowResult(text=reply)
        await self._environment.render_completion(state)
        await self._environment.rubric.score_rollout(state)
        reward = float(state["reward"])
        return RowResult(reward=min(max(reward, 0.0), 1.0) if math.isfinite(reward) else 0.0)

    def _problem(self, row: int) -> RowResult:
        prompt = self._input(row)["prompt"]
        if not self._chat:
            return RowResult(text=str(prompt))
        try:
            text, opening = render(prompt, self._format, tools=self._tools)
        except ChatError as error:
            raise EnvironmentUnusable("refused_environment", str(error)) from error
        return RowResult(text=text, opening=opening)

    def _input(self, row: int) -> dict[str, Any]:
        """Return the row as a rollout gets it, without the None that Arrow fills in for absent message keys."""
        found = dict(self._rows[row])
        if self._chat:
            try:
                found["prompt"] = [
                    {key: value for key, value in message.items() if value is not None} for message in found["prompt"]
                ]
            except (KeyError, TypeError, AttributeError) as error:
                raise EnvironmentUnusable("refused_environment", f"row {row} has no list of messages") from error
        return found

    async def _replay(self, row: int, turns: Sequence[str]) -> tuple[Any, str | None]:
        """Return the state after `turns`, and the environment's reply; None if it ended the rollout."""
        environment, failure = self._environment, self._package.Error
        state = await environment.init_state(self._input(row), None, "", {})
        reply: str | None = None
        try:
            state = await environment.setup_state(state)
            context = await environment.get_prompt_messages(state)
            for number, text in enumerate(turns):
                turn = self._turn(text, number)
                await environment.add_trajectory_step(state, _step(state, context, turn))
                reply = None
                if await environment.is_completed(state):
                    break
                following = await environment.get_prompt_messages(state)
                if state.get("final_env_response") is not None:
                    break
                reply = self._reply(context, turn, following)
                context = following
        except failure as error:
            state["error"], reply = error, None
        return state, reply

    def _turn(self, text: str, number: int) -> Any:
        if not self._chat:
            return text
        return [turn_of(text, self._format, number=number, tools=bool(self._tools))]

    def _reply(self, context: Any, turn: Any, following: Any) -> str:
        before = context + turn
        if following[: len(before)] != before:
            raise EnvironmentUnusable("refused_environment", "it rewrites earlier messages, which is not supported")
        if not self._chat:
            return str(following[len(before) :])
        return render_reply(following[len(before) :], self._format)

    def _digest(self) -> str:
        """Compute the BLAKE3 digest of the rows' fields that determine problems and rewards."""
        hasher: Any = blake3()
        for row in self._rows:
            kept = {key: row[key] for key in ("prompt", "answer", "info", "task") if key in row}
            hasher.update(json.dumps(kept, sort_keys=True, default=str).encode() + b"\n")
        return str(hasher.hexdigest())


def _step(state: Any, prompt: Any, completion: Any) -> dict[str, Any]:
    """Build the package's TrajectoryStep without a client's response."""
    return {
        "prompt": prompt,
        "completion": completion,
        "response": None,
        "tokens": None,
        "reward": None,
        "advantage": None,
        "is_truncated": False,
        "trajectory_id": state["trajectory_id"],
        "extras": {},
    }


def _check_module(name: str) -> None:
    """Raise EnvironmentUnusable unless the module was made for verifiers; imports nothing of it."""
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or not _requires_verifiers(top):
        raise EnvironmentUnusable("refused_environment", f"{top} does not declare that it is made for verifiers")
    if importlib.util.find_spec(top) is None:
        raise EnvironmentUnusable(
            "environment_missing", f"{top} is not installed here: install it, if you trust its author"
        )


def _find_entry(package: ModuleType, name: str, attribute: str) -> Callable[..., Any]:
    """Return the factory of the environment."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise EnvironmentUnusable("environment_missing", f"{name} cannot be imported: {error}") from error
    if name.partition(".")[0] == package.__name__ and not attribute:  # its load_environment imports what it is told
        raise EnvironmentUnusable("refused_environment", f"name an environment class of {name}, as {name}:Class")
    made: Any = getattr(module, attribute or "load_environment", None)
    if attribute and not (isinstance(made, type) and issubclass(made, package.Environment)):
        raise EnvironmentUnusable("refused_environment", f"{name} has no environment class {attribute}")
    if not callable(made):
        raise EnvironmentUnusable("refused_environment", f"{name} has no load_environment")
    found: Callable[..., Any] = made
    return found


def _requires_verifiers(top: str) -> bool:
    """Return whether a top-level module belongs to verifiers, to a package that requires it, or to none (a local
    file).
    """
    owners = metadata.packages_distributions().get(top, [])
    needed = (re.split(r"[^A-Za-z0-9._-]", line)[0] for owner in owners for line in metadata.requires(owner) or ())
    return not owners or "verifiers" in owners or "verifiers" in needed


def _version_of(module: str) -> str | None:
    owners = metadata.packages_distributions().get(module.partition(".")[0], [])
    return metadata.version(owners[0]) if owners else None


def _make(entry: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return entry(**arguments)
    except Exception as error:
        raise EnvironmentUnusable("environment_failed", f"it does not accept its arguments: {error!r}") from error


def _check_supported(package: ModuleType, environment: Any) -> None:
    kinds = {cls.__name__ for cls in type(environment).__mro__}
    if not isinstance(environment, package.MultiTurnEnv) or kinds & _UNSUPPORTED:
        raise EnvironmentUnusable(
            "refused_environment", f"a {type(environment).__name__} defines its own rollouts, or needs a service"
        )
    for rubric in _rubrics(environment.rubric):
        names = {cls.__name__ for cls in type(rubric).__mro__}
        held = [*vars(rubric).values(), *rubric.class_objects.values(), *_closure_values(rubric.funcs)]
        if "JudgeRubric" in names or any(type(each).__module__.partition(".")[0] in _CLIENTS for each in held):
            raise EnvironmentUnusable(
                "refused_environment", "its rubric calls a model or a service, which is not reproducible"
            )
        if any(rubric._is_group_func(func) for func in rubric.funcs):  # noqa: SLF001  (its own test)
            raise EnvironmentUnusable(
                "refused_environment", "its rubric scores the completions of a group against each other"
            )


def _rubrics(rubric: Any) -> Iterator[Any]:
    yield rubric
    for inner in getattr(rubric, "rubrics", ()):
        yield from _rubrics(inner)


def _closure_values(functions: Sequence[Any]) -> Iterator[object]:
    """Yield the values in the closures of reward functions."""
    for function in functions:
        for cell in getattr(function, "__closure__", None) or ():
            yield cell.cell_contents
