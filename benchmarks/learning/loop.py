"""Reinforcement learning in one process: the product's engine, rewards and training step without a swarm."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace

from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import train_step
from coordinator.training.optimizers import make_optimizer
from coordinator.training.warm_start import warm_start
from node.engines.base import SampleRequest
from node.engines.torch import TorchEngine
from node.environments import Environment, Problem, load_environment
from node.environments.grading import grade
from node.policy import load_policy, render_completion, render_prompt, save_policy
from node.protocol.run import BatchSpec, EnvironmentSpec, LengthSpec, ModelSpec, RunSpec, SamplingSpec, TrainingSpec
from shardcast.wire import derive

ENVIRONMENTS = (EnvironmentSpec(name="arithmetic"), EnvironmentSpec(name="reverse"))


@dataclass(frozen=True, slots=True)
class Task:
    """What is learned: `prompts` problems a step with `samples` completions each, for `steps` steps, from `seed`."""

    seed: int
    steps: int
    prompts: int = 16
    samples: int = 8
    environments: tuple[EnvironmentSpec, ...] = ENVIRONMENTS

    def problems(self, step: int) -> list[tuple[int, int]]:
        """Step `step`'s problems as (environment, index), the same for everybody who has the seed."""
        drawn = (derive("veriswarm/1 benchmark", *map(_bytes, (self.seed, step, at))) for at in range(self.prompts))
        return [(each[0] % len(self.environments), int.from_bytes(each[8:16], "big") >> 1) for each in drawn]

    def sample_seed(self, step: int, prompt: int, sample: int) -> bytes:
        """The 16 bytes that force a completion."""
        return derive("veriswarm/1 benchmark sample", *map(_bytes, (self.seed, step, prompt, sample)))[:16]


@dataclass(slots=True)
class Curve:
    """Step by step: mean rewards, seconds in all and of generation alone, and what the training step says of itself.

    `missed` is how many tokens a completion is off its length target, on average; empty without targets.
    """

    rewards: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    generation_seconds: list[float] = field(default_factory=list)
    stats: list[dict[str, float]] = field(default_factory=list)
    missed: list[float] = field(default_factory=list)


def spec_of(
    task: Task,
    *,
    max_new_tokens: int = 48,
    only_signal: bool = False,
    length: LengthSpec | None = None,
    **training: object,
) -> RunSpec:
    """The demonstration's recipe, with changes."""
    recipe = {"steps": task.steps, "learning_rate": 1e-4, **training}
    return RunSpec(
        name="benchmark",
        environments=tuple(replace(each, length=length) for each in task.environments),
        model=ModelSpec(initial="tiny"),
        sampling=SamplingSpec(group_size=task.samples, max_prompt_tokens=64, max_new_tokens=max_new_tokens),
        batch=BatchSpec(only_signal=only_signal),
        training=TrainingSpec(**recipe),  # type: ignore[arg-type]  # checked by the benchmark that names them
    )


def warmed_up(seed: int, path: Path) -> Path:
    """A policy file of the warm start."""
    model, tokenizer = warm_start(seed=seed)
    save_policy(model, tokenizer, path)
    return path


ROUNDS = 4
"""Online filtering gives up after so many times the problems of a step."""


def learn(first: Path, task: Task, spec: RunSpec, *, lag: int = 0, threads: int = 1) -> Curve:
    """Train from the policy file `first`; completions are of the policy `lag` steps before, as in a busy swarm."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_learn(first, task, spec, lag=lag, threads=threads, folder=Path(folder)))


async def _learn(first: Path, task: Task, spec: RunSpec, *, lag: int, threads: int, folder: Path) -> Curve:
    engine = TorchEngine(spec, threads=threads, max_rows=task.prompts * task.samples)
    policy = load_policy(first, dtype=torch.float32)
    reference = load_policy(first, dtype=torch.float32).model if spec.training.kl_coefficient else None
    optimizer = make_optimizer(policy.model, spec.training)
    files, curve = [first], Curve()
    for step in range(task.steps):
        started = time.perf_counter()
        version = max(0, step - lag)
        await engine.load(files[version], version=version)
        groups = await _generate(engine, spec, task, step)
        drawn = groups
        while spec.batch.only_signal and len(drawn) < ROUNDS * task.prompts and _useful(drawn) < task.prompts:
            drawn = [*drawn, *await _generate(engine, spec, task, step + task.steps * len(drawn) // task.prompts)]
        if drawn is not groups:
            groups = [group for group in drawn if group.has_signal][: task.prompts]
        generated = time.perf_counter()
        stats = train_step(policy.model, optimizer, groups, spec=spec, step=step, reference=reference)
        policy.model.train(mode=False)
        files.append(folder / f"{step + 1}.safetensors")
        save_policy(policy.model, policy.tokenizer, files[-1])
        curve.seconds.append(time.perf_counter() - started)
        curve.generation_seconds.append(generated - started)
        rewards = [reward for group in drawn for reward in group.rewards]
        curve.rewards.append(sum(rewards) / len(rewards))
        curve.stats.append(stats)
        if spec.environments[0].length is not None:
            curve.missed.append(_missed(spec, task, step, groups))
    await engine.close()
    return curve


def _useful(groups: Sequence[Group]) -> int:
    return sum(group.has_signal for group in groups)


def _drawn(spec: RunSpec, task: Task, step: int) -> list[tuple[Environment, Problem]]:
    environments = [load_environment(each) for each in spec.environments]
    drawn = task.problems(step)
    return [(environments[environment], environments[environment].problem(index)) for environment, index in drawn]


def _missed(spec: RunSpec, task: Task, step: int, groups: Sequence[Group]) -> float:
    """Tokens between a completion's length and its target."""
    return statistics.fmean(
        abs(len(sample.completion_ids) - problem.data["target_tokens"])
        for (_, problem), group in zip(_drawn(spec, task, step), groups, strict=True)
        for sample in group.rollouts
    )


async def _generate(engine: TorchEngine, spec: RunSpec, task: Task, step: int) -> list[Group]:
    drawn = _drawn(spec, task, step)
    requests = [
        SampleRequest(tuple(render_prompt(engine.policy, problem.prompt)), task.sample_seed(step, at, sample))
        for at, (_, problem) in enumerate(drawn)
        for sample in range(task.samples)
    ]
    rollouts = await engine.generate(requests)
    groups = []
    for at, (environment, problem) in enumerate(drawn):
        own = rollouts[at * task.samples : (at + 1) * task.samples]
        texts = [render_completion(engine.policy, rollout.completion_ids) for rollout in own]
        rewards = tuple(
            grade(environment, problem, [text], tokens=len(rollout.completion_ids))
            for rollout, text in zip(own, texts, strict=True)
        )
        samples = tuple(
            Sample(tuple(each.prompt_ids), tuple(each.completion_ids), tuple(each.logprobs)) for each in own
        )
        groups.append(Group(engine.version or 0, rewards, samples))
    return groups


def ends(rewards: Sequence[float], *, over: int = 5) -> tuple[float, float]:
    """The mean of the first and of the last `over` steps."""
    return sum(rewards[:over]) / over, sum(rewards[-over:]) / over


def _bytes(number: int) -> bytes:
    return number.to_bytes(8, "big")
