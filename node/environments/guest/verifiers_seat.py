"""The one seat of an environment of `verifiers.v1`, whose turns are given.

Stands in for the Agent, Interaction, Rollout and chat harness of the package: turns are committed to the trace as it
does, and tools run in this process. Where the turns are at their end, a reply is what the environment wants to be told
next; for a reward, the run is stopped as by a limit of turns.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from .adapter import Forbidden, Json, Turn, Unusable, openai_turn, refuse_use
from .verifiers_runtime import ScriptRuntime
from .verifiers_tools import ToolServers

_CLOCK = "it reads how long something took, which differs between machines"
_USAGE = "it reads a model call's tokens or times, which only the machine that drew them has"
_PROVISIONS = "it provisions a machine for several runs, and a rollout here is one run"
_STEERS = "it sends messages while the model writes, and not between turns"
_TWICE = "it runs its agent more than once for a problem, and a rollout here is one run"


class OutOfTurns(BaseException):
    """The environment waits for a turn that nobody wrote yet; no error of its own, which it might catch."""


@dataclass(frozen=True)
class Stage:
    """What all replays of one environment share; `v1` is the package, `env` its Env."""

    v1: ModuleType
    env: Any
    task_class: Any
    shared_tools: ToolServers
    runtime: ScriptRuntime
    call_class: type


class Episode:
    """One replay: the turns that are left, and what the environment asks when there are none."""

    def __init__(self, stage: Stage, index: int, turns: list[Turn], *, scored: bool) -> None:
        self.stage, self.index, self.scored = stage, index, scored
        self.pending: list[Any] | None = None
        self._turns = iter(turns)
        self._traces: list[Any] = []

    async def play(self, task: Any) -> None:
        """Run the environment on `task`; raises OutOfTurns, and what the environment raises."""
        env, v1 = self.stage.env, self.stage.v1
        agents = v1.Agents(env.config, lambda name, config: _Seat(self, name, config))
        await env.setup(agents)
        await env.run(task, agents)
        if not self.scored or type(env).finalize is v1.Env.finalize:
            return
        episode = v1.Episode(task=_trace_task(task))
        episode.traces.extend(self._traces)
        await env.finalize(task, episode)

    def reward(self) -> float:
        """Return the reward of a finished play, 0 for one that failed."""
        if len(self._traces) != 1 or not self._traces[0].ok:
            return 0.0
        return float(self._traces[0].reward)

    def next_turn(self, pending: list[Any]) -> Turn | None:
        """Return the next turn; None to stop as a limit of turns does. `pending`: what the model is told before it."""
        turn = next(self._turns, None)
        if turn is None and not self.scored:
            self.pending = pending
            raise OutOfTurns
        return turn

    def add(self, trace: Any) -> None:
        """Note a run that begins."""
        if self._traces:
            refuse_use(_TWICE)
        self._traces.append(trace)


class _Seat:
    """Stands in for the package's Agent."""

    def __init__(self, episode: Episode, name: str, config: Any) -> None:
        self._episode, self.name, self.config = episode, name, config
        self.trainable = True

    async def run(self, task: Any, **_: Any) -> Any:
        run = _Run(self._episode, task, self)
        await run.open()
        await run.step(None)
        return await run.close("agent_completed")

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[_Interaction]:
        run = _Run(self._episode, task, self, has_user=True)
        await run.open()
        # An error leaves the run unscored, as the package does.
        yield (interaction := _Interaction(run))
        await interaction.close()

    def provision(self, *_: Any, **__: Any) -> NoReturn:
        refuse_use(_PROVISIONS)


class _Interaction:
    """Stands in for the package's Interaction: the environment is the user."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._started = self._over = self._closed = False

    @property
    def trace(self) -> Any:
        return self._run.trace

    async def turn(self, message: Any = None) -> Any:
        """Tell the model a message, or none where the task's prompt opens; return its segment."""
        v1 = self._run.v1
        if self._over or self._closed:
            raise RuntimeError("the exchange is over (the run ended); read interaction.trace")
        prompted = not self._started and self.trace.task.data.prompt is not None
        if (message is None) != prompted:
            raise ValueError("the task's prompt opens the exchange with a bare turn(), and nothing else does")
        self._started = True
        messages = [v1.UserMessage(content=message)] if isinstance(message, str) else list(message or ())
        parse = importlib.import_module("verifiers.v1.dialects").parse_message
        before = len(self.trace.nodes)
        turns = self.trace.num_turns
        await self._run.step([parse(each) if isinstance(each, dict) else each for each in messages])
        segment = importlib.import_module("verifiers.v1.agent").Segment
        if self.trace.num_turns == turns:
            self._over = True
            return segment(messages=[], terminated=True)
        return segment(messages=_said(self.trace.nodes[before:]))

    async def close(self) -> Any:
        """End the exchange and return the trace."""
        if not self._closed:
            self._closed = True
            await self._run.close("user_closed")
        return self.trace

    async def steer(self, *_: Any, **__: Any) -> NoReturn:
        refuse_use(_STEERS)

    send = steer


class _Run:
    """Stands in for the package's Rollout and its harness: one trace, and the conversation that it grows from."""

    def __init__(self, episode: Episode, task: Any, seat: _Seat, *, has_user: bool = False) -> None:
        self.episode, self.task, self._seat, self._has_user = episode, task, seat, has_user
        self.v1 = episode.stage.v1
        self.trace = self._new_trace()
        self._stops = task.hooks("stop")
        self._conversation: list[Any] = _opening(self.v1, task.data)
        self._told = 0
        self._servers: list[ToolServers] = []
        self._tools: list[Any] = []
        episode.add(self.trace)

    async def open(self) -> None:
        """Prepare the task and its tools."""
        stage = self.episode.stage
        check_task(self.task)
        if self.task.data.prompt is None and not self._has_user:
            raise ValueError("the task has no prompt, and nobody to open the conversation")
        await self._hook(self.task.setup)
        own = ToolServers(self.task.toolsets(self.task.config))
        await own.start(self.task.data)
        # Shared tools are those of the taskset's own tasks, as in the package.
        shared = isinstance(self.task, stage.task_class)
        self._servers = [own, stage.shared_tools] if shared else [own]
        schemas = [schema for servers in self._servers for schema in servers.schemas()]
        tool = importlib.import_module("verifiers.v1.types").Tool
        self._tools = [tool(**schema) for schema in schemas]

    async def step(self, messages: list[Any] | None) -> None:
        """Go on with the user's messages until the model answers without a call, or something stops the run."""
        self._conversation += messages or []
        while not await self._stopped():
            turn = self.episode.next_turn(self._conversation[self._told :])
            if turn is None:
                self.trace.stop("max_turns")
                return
            message = self._commit(turn)
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                content = await self._call(call)
                result = self.v1.ToolMessage(tool_call_id=call.id, content=content, name=call.name)
                self._conversation.append(result)

    async def close(self, condition: str) -> Any:
        """End the run, and score it where a reward is asked."""
        self.trace.stop(condition)
        self.trace.ok = True
        if self.episode.scored:
            await self._hook(self.task.finalize)
            await self.task.score(self.trace, self.episode.stage.runtime)
        return self.trace

    def _new_trace(self) -> Any:
        types = importlib.import_module("verifiers.v1.trace")
        state_class = importlib.import_module("verifiers.v1.state").state_cls(type(self.task))
        trace = types.Trace(
            id=str(self.episode.index),  # the same for everybody
            verifiers=types.VersionInfo(version=""),
            task=_trace_task(self.task),
            state=state_class(),
            agent=types.AgentInfo.model_construct(config=self._seat.config, name=self._seat.name),
        )
        vars(trace)["timing"] = Forbidden(_CLOCK)
        return trace

    async def _stopped(self) -> bool:
        limit = getattr(self._seat.config, "max_turns", None)
        if limit is not None and self.trace.num_turns >= limit:
            self.trace.stop("max_turns")
        for stop in self._stops:
            if self.trace.stop_condition is None and await _invoke(stop, {"trace": self.trace}):
                self.trace.stop(stop.__name__)
        return self.trace.stop_condition is not None

    def _commit(self, turn: Turn) -> Any:
        """Add a turn to the trace, and return its message."""
        parse = importlib.import_module("verifiers.v1.dialects").parse_message
        message = parse(openai_turn(turn))
        reason = "tool_calls" if message.tool_calls else "stop"
        graph = importlib.import_module("verifiers.v1.graph")
        response = importlib.import_module("verifiers.v1.types").Response(
            id="", created=0, model="policy", message=message, finish_reason=reason
        )
        node = graph.prepare_turn(self.trace, self._conversation, self._tools).commit(response)
        self.trace.calls.append(self.episode.stage.call_class(node=node, model="policy", finish_reason=reason))
        self._conversation = [*self._conversation, message]
        self._told = len(self._conversation)
        return message

    async def _call(self, call: Any) -> str:
        for servers in self._servers:
            if servers.has(call.name):
                return await servers.call(call.name, call.arguments, self.trace)
        return f"error: unknown tool {call.name!r}"

    async def _hook(self, hook: Callable[..., Any]) -> None:
        await _invoke(hook, {"trace": self.trace, "runtime": self.episode.stage.runtime})


def call_class() -> type:
    """Return a model call as a trace has it, of which only its place and how it ended are the same for everybody."""
    base: type = importlib.import_module("verifiers.v1.trace").ModelCall

    class Call(base):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in ("usage", "time", "sampling"):
                refuse_use(_USAGE)
            return super().__getattribute__(name)

    return Call


def check_task(task: Any) -> None:
    """Raise Unusable for what a task needs besides its conversation and tools."""
    data, kind = task.data, type(task).__name__
    if task.NEEDS_CONTAINER or any(getattr(data, name, None) for name in ("image", "workdir", "skills", "artifacts")):
        raise Unusable("refused_environment", f"{kind} needs a container, files or skills of its own")
    if task.config.judges:
        raise Unusable("refused_environment", f"{kind} asks a judge, a model, which nobody can repeat")
    decorators = importlib.import_module("verifiers.v1.utils.decorators")
    if decorators.discover_decorated(task, "intercept"):
        raise Unusable("refused_environment", f"{kind} changes requests or responses on their way (@vf.intercept)")
    for stop in task.hooks("stop"):
        if set(inspect.signature(stop).parameters) != {"trace"}:
            raise Unusable("refused_environment", f"its stop {stop.__name__} reads more than the trace")


def _trace_task(task: Any) -> Any:
    types = importlib.import_module("verifiers.v1.trace")
    return types.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def _opening(v1: ModuleType, data: Any) -> list[Any]:
    """Return the messages that the model is shown before anybody says anything."""
    system = [v1.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    if data.prompt is None:
        return system
    return system + ([v1.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt))


def _said(nodes: list[Any]) -> list[Any]:
    """Return what a segment said: the model's messages, and the results of tools between them."""
    first = next(place for place, node in enumerate(nodes) if node.sampled)
    return [node.message for node in nodes[first:] if node.sampled or node.message.role == "tool"]


async def _invoke(hook: Callable[..., Any], available: Json) -> Any:
    """Call a hook with those of the values that it names, as the package does."""
    parameters = inspect.signature(hook).parameters
    result = hook(**{name: available[name] for name in parameters if name in available})
    return await result if inspect.isawaitable(result) else result
