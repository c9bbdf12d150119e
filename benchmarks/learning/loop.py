"""Reinforcement learning in one process: the product's engine, rewards and training step without a swarm."""

from __future__ import annotations

import asyncio
import functools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec import UNSET
from msgspec.structs import replace

from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import train_step
from coordinator.training.optimizers import make_optimizer
from node.engines.base import SampleRequest
from node.engines.torch import TorchEngine
from node.environments import NO_DATASETS, Environment, Problem, load_environments
from node.environments.grading import grade
from node.policy.file import load_policy, render_completion, render_prompt, save_policy
from node.protocol.pools import PoolHistory, first_candidate, group_mean
from node.protocol.run import (
    BatchSpec,
    EnvironmentSpec,
    LengthSpec,
    ModelSpec,
    PoolsSpec,
    ProblemsSpec,
    RunSpec,
    SamplingSpec,
    TrainingSpec,
)
from node.protocol.slots import SlotProblem, slot_problem
from node.protocol.submission import Rollout
from shardcast.wire import derive

ENVIRONMENTS = (EnvironmentSpec(name="arithmetic"), EnvironmentSpec(name="reverse"))


@dataclass(frozen=True, slots=True)
class LearningTask:
    """Learning task: `steps` steps of `prompts` problems with `samples` completions each, drawn from `seed`."""

    seed: int
    steps: int
    prompts: int = 16
    samples: int = 8
    environments: tuple[EnvironmentSpec, ...] = ENVIRONMENTS

    def problems(self, step: int) -> list[tuple[int, int]]:
        """Draw the problems of a step as (environment, index)."""
        drawn = (derive("swarmproof/1 benchmark", *map(_bytes, (self.seed, step, at))) for at in range(self.prompts))
        return [(each[0] % len(self.environments), int.from_bytes(each[8:16], "big") >> 1) for each in drawn]

    def sample_seed(self, step: int, prompt: int, sample: int) -> bytes:
        """Derive the 16 bytes that force a completion."""
        return derive("swarmproof/1 benchmark sample", *map(_bytes, (self.seed, step, prompt, sample)))[:16]


@dataclass(slots=True)
class LearningCurve:
    """Step by step: mean rewards, seconds in all and of generation alone, and what the training step says of itself.

    `signal` is the share of groups whose rewards differ. `missed` is how many tokens a completion is off its length
    target, on average; empty without targets. `held_out` is what the last policy earns on held-out problems, where
    somebody has measured that.
    """

    rewards: list[float] = field(default_factory=list)
    signal: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    generation_seconds: list[float] = field(default_factory=list)
    stats: list[dict[str, float]] = field(default_factory=list)
    missed: list[float] = field(default_factory=list)
    held_out: float | None = None


class Problems:
    """Chooses each step's problems: the task's own, or those of the slots of a run with finite sets."""

    def __init__(self, task: LearningTask, spec: RunSpec) -> None:
        self._task, self._spec, self._history = task, spec, PoolHistory()
        self._are_finite = any(isinstance(one.problems, ProblemsSpec) for one in spec.environments)

    def draw(self, step: int, *, version: int) -> list[SlotProblem]:
        """Draw the problems of a step whose completions are of policy `version`."""
        if not self._are_finite:
            return [SlotProblem(environment, index) for environment, index in self._task.problems(step)]
        manifest = derive("swarmproof/1 benchmark manifest", _bytes(self._task.seed), _bytes(step)).hex()
        drawn = []
        for slot in range(self._task.prompts):
            where = {"run_id": "0" * 64, "manifest_digest": manifest}
            candidate = first_candidate(
                self._spec, **where, slot=slot, mean_of=lambda problem: self._history.mean_before(problem, version)
            )
            drawn.append(slot_problem(self._spec, **where, slot=slot, candidate=candidate))
        return drawn

    def note(self, problems: Sequence[SlotProblem], groups: Sequence[Group], *, step: int) -> None:
        """Record what a step's groups earned."""
        for problem, group in zip(problems, groups, strict=True):
            self._history.note(problem, group_mean(group.rewards), head=step)


def spec_of(
    task: LearningTask,
    *,
    max_new_tokens: int = 48,
    only_signal: bool = False,
    length: LengthSpec | None = None,
    problems: int = 0,
    pools: bool = False,
    **training: object,
) -> RunSpec:
    """Return the demonstration's recipe with changes; each environment has `problems` problems, 0: infinitely many."""
    finite = ProblemsSpec(count=problems) if problems else UNSET
    recipe = {"steps": task.steps, "learning_rate": 1e-4, **training}
    return RunSpec(
        name="benchmark",
        environments=tuple(replace(each, length=length, problems=finite) for each in task.environments),
        model=ModelSpec(initial="tiny"),
        sampling=SamplingSpec(group_size=task.samples, max_prompt_tokens=64, max_new_tokens=max_new_tokens),
        batch=BatchSpec(only_signal=only_signal, pools=PoolsSpec() if pools else UNSET),
        training=TrainingSpec(**recipe),  # type: ignore[arg-type]  # checked by the benchmark that names them
    )


ROUNDS = 4
"""Online filtering gives up after so many times a step's problems."""


def learn(
    first: Path,
    task: LearningTask,
    spec: RunSpec,
    *,
    lag: int = 0,
    threads: int = 1,
    keep: Path | None = None,
    datasets: Mapping[str, Path] = NO_DATASETS,
) -> LearningCurve:
    """Train from the policy file `first`; completions are of the policy `lag` steps before, as in a busy swarm.

    The last policy becomes the file `keep`. `datasets` are the files of the run's own, by digest.
    """
    environments = load_environments(spec, datasets)
    with tempfile.TemporaryDirectory() as folder:
        curve = asyncio.run(_learn(first, task, spec, environments, lag=lag, threads=threads, folder=Path(folder)))
        if keep is not None:
            shutil.copyfile(Path(folder) / f"{task.steps}.safetensors", keep)
    return curve


async def _learn(
    first: Path,
    task: LearningTask,
    spec: RunSpec,
    environments: Sequence[Environment],
    *,
    lag: int,
    threads: int,
    folder: Path,
) -> LearningCurve:
    engine = TorchEngine(spec, threads=threads, max_rows=task.prompts * task.samples)
    policy = load_policy(first, dtype=torch.float32)
    reference = load_policy(first, dtype=torch.float32).model if spec.training.kl_coefficient else None
    optimizer = make_optimizer(policy.model, spec.training)
    files, curve, problems = [first], LearningCurve(), Problems(task, spec)
    for step in range(task.steps):
        started = time.perf_counter()
        version = max(0, step - lag)
        await engine.load(files[version], version=version)
        asked = problems.draw(step, version=version)
        groups = await _generate(engine, spec, task, step, _drawn(environments, asked))
        problems.note(asked, groups, step=step)
        drawn = groups
        while spec.batch.only_signal and len(drawn) < ROUNDS * task.prompts and _useful(drawn) < task.prompts:
            extra = step + task.steps * len(drawn) // task.prompts
            others = problems.draw(extra, version=version)
            drawn = [*drawn, *await _generate(engine, spec, task, extra, _drawn(environments, others))]
            problems.note(others, drawn[-len(others) :], step=step)
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
        curve.signal.append(_useful(drawn) / len(drawn))
        curve.stats.append(stats)
        if spec.environments[0].length is not None:
            curve.missed.append(_missed(_drawn(environments, asked), groups))
    await engine.close()
    return curve


def _useful(groups: Sequence[Group]) -> int:
    return sum(group.has_signal for group in groups)


def _drawn(environments: Sequence[Environment], asked: Sequence[SlotProblem]) -> list[tuple[Environment, Problem]]:
    return [(environments[one.environment], environments[one.environment].problem(one.problem)) for one in asked]


def _missed(drawn: Sequence[tuple[Environment, Problem]], groups: Sequence[Group]) -> float:
    """Return the mean number of tokens between a completion's length and its target."""
    return statistics.fmean(
        abs(len(sample.completion_ids) - problem.data["target_tokens"])
        for (_, problem), group in zip(drawn, groups, strict=True)
        for sample in group.rollouts
    )


async def _generate(
    engine: TorchEngine, spec: RunSpec, task: LearningTask, step: int, drawn: Sequence[tuple[Environment, Problem]]
) -> list[Group]:
    requests = [
        SampleRequest(
            tuple(render_prompt(engine.policy, problem.prompt, special_tokens=spec.sampling.special_tokens)),
            task.sample_seed(step, at, sample),
        )
        for at, (_, problem) in enumerate(drawn)
        for sample in range(task.samples)
    ]
    rollouts = await engine.generate(requests)

    @functools.cache  # completions of one problem are often equal, and a program takes a sandbox to run
    def earned(at: int, text: str, tokens: int) -> float:
        environment, problem = drawn[at]
        return grade(environment, problem, [text], tokens=tokens)

    def reward(at: int, rollout: Rollout) -> float:
        return earned(at, render_completion(engine.policy, rollout.completion_ids), len(rollout.completion_ids))

    return grouped(rollouts, task.samples, version=engine.version or 0, reward=reward)


def grouped(
    rollouts: Sequence[Rollout], size: int, *, version: int, reward: Callable[[int, Rollout], float]
) -> list[Group]:
    """Make the trainer's groups of `size` consecutive rollouts; `reward` takes the group's number and a rollout."""
    groups = []
    for at in range(len(rollouts) // size):
        own = rollouts[at * size : (at + 1) * size]
        samples = [Sample(tuple(each.prompt_ids), tuple(each.completion_ids), tuple(each.logprobs)) for each in own]
        groups.append(Group(version, tuple(reward(at, each) for each in own), tuple(samples)))
    return groups


def _bytes(number: int) -> bytes:
    return number.to_bytes(8, "big")
