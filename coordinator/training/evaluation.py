"""Evaluate a policy: its mean reward on held-out problems, per environment of a run.

Held-out problems are drawn like a slot's, but from a separate domain and a seed of the evaluator's choice. No slot's
number or policy leads there, and the same seed gives everybody the same problems and, with the torch engine in the
run's dtype, the same completions. What is held out are indices: an environment with few problems will repeat them in
training (docs/operating.md).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import msgspec

from coordinator.training.measured import NOTHING_MEASURED, CompletionOutcome, MeasuredBefore
from node.engines.base import Engine, EngineError, Interrupted, MakeEngine, SampleRequest
from node.engines.torch import MAX_ROWS, TorchEngine
from node.environments import (
    NO_DATASETS,
    Environment,
    EnvironmentFault,
    Problem,
    check_rewards,
    held_out_rows,
    load_environments,
)
from node.episodes.conversation import asking, graded, turn_rules
from node.errors import NodeError
from node.policy.errors import PolicyError
from node.policy.file import Blueprint, render_prompt
from node.protocol.run import ProofSpec, RunSpec, SamplingSpec
from node.protocol.slots import SEED_BYTES
from node.protocol.submission import Rollout
from node.protocol.turns import RUN_RULES, TurnRules, ends_whole
from shardcast.wire import derive

log = logging.getLogger(__name__)

MAX_COMPLETIONS = 1_000_000
GREEDY_TEMPERATURE = 1e-6
"""No noise reaches logits that differ by more than 3e-5: the likeliest token wins, with any engine."""

IN_FLIGHT = 2 * MAX_ROWS
"""Completions that are drawn at once."""

_Z_95 = 1.959964
"""97.5 % quantile of the standard normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """What to draw: `problems` of each environment, `samples` completions of each.

    `temperature` None is the run's, 0 is greedy, for which one sample per problem suffices. Raises ValueError for more
    than MAX_COMPLETIONS of an environment. `make_engine` is called on the event loop that draws.
    """

    problems: int = 128
    samples: int = 1
    temperature: float | None = None
    seed: int = 0
    make_engine: MakeEngine = TorchEngine

    def __post_init__(self) -> None:
        if not 1 <= self.problems * self.samples <= MAX_COMPLETIONS or self.samples < 1:
            raise ValueError(f"problems * samples must be 1 to {MAX_COMPLETIONS:,} per environment")


class EnvironmentScore(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one environment: rewards in 0 .. 1, lengths in tokens with the end mark.

    `reward` is the mean over problems of the mean over samples, `low` and `high` its 95 % confidence interval; all None
    if nothing could be judged. `unjudged` completions failed for reasons of this machine, and count in lengths only.
    `cut_off` is the share of completions that reached the length limit.
    """

    name: str
    weight: int
    problems: int
    completions: int
    unjudged: int
    reward: float | None
    low: float | None
    high: float | None
    tokens_mean: float
    tokens_median: float
    tokens_most: int
    cut_off: float


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A policy's rewards; `reward` is weighted over all environments as in the run. `temperature` 0 means greedy."""

    seed: int
    samples: int
    temperature: float
    reward: float | None
    environments: tuple[EnvironmentScore, ...]


def evaluate_policy(
    policy: Path,
    *,
    spec: RunSpec,
    settings: EvaluationSettings,
    datasets: Mapping[str, Path] = NO_DATASETS,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Evaluate the policy file `policy` on held-out problems of the environments of `spec`; blocks until done.

    Of a dataset these are its held-out rows, of which there may be fewer; `datasets` are their files, by digest.

    `stop` is polled, and raises Interrupted when true. Raises EnvironmentFault or SandboxFailed if this machine cannot
    compute rewards, PolicyError for the file, and EngineError. Must not be called from a running event loop.
    """
    found = [
        tasks.measured(spec)
        for tasks in judge_tasks(policy, spec=spec, settings=settings, datasets=datasets, stop=stop)
    ]
    judged = [(one.reward, one.weight) for one in found if one.reward is not None]
    weights = sum(weight for _, weight in judged)
    return Evaluation(
        seed=settings.seed,
        samples=settings.samples,
        temperature=spec.sampling.temperature if settings.temperature is None else float(settings.temperature),
        reward=sum(reward * weight for reward, weight in judged) / weights if judged else None,
        environments=tuple(found),
    )


def held_out_rewards(
    policy: Path,
    *,
    step: int,
    spec: RunSpec,
    settings: EvaluationSettings,
    datasets: Mapping[str, Path],
    stop: Callable[[], bool],
) -> dict[str, float]:
    """Return mean rewards of policy `step`, by environment as a tracker names them; nothing if this machine cannot
    tell or was stopped.
    """
    try:
        found = evaluate_policy(policy, spec=spec, settings=settings, datasets=datasets, stop=stop)
    except (NodeError, EngineError, PolicyError) as error:
        log.warning("policy %d not evaluated: %s", step, error)
        return {}
    rewards = {f"evaluation/{each.name}": each.reward for each in found.environments}
    known = {name: reward for name, reward in rewards.items() if reward is not None}
    log.info("policy %d on held-out problems: %s", step, known)
    return known


def judge_tasks(
    policy: Path,
    *,
    spec: RunSpec,
    settings: EvaluationSettings,
    datasets: Mapping[str, Path] = NO_DATASETS,
    indexes: Sequence[int] | None = None,
    stop: Callable[[], bool] = lambda: False,
    measurements: MeasuredBefore = NOTHING_MEASURED,
) -> list[TaskSet]:
    """Judge completions of the problems `indexes` of each environment, those that it has, or of held-out ones; raises
    as `evaluate_policy`.

    What `measurements` know is not drawn again, and they are told of all else.
    """
    environments = load_environments(spec, datasets)
    check_rewards(environments)
    drawing = _drawing(spec, settings)
    work = _evaluate(
        policy, drawing, environments, settings=settings, indexes=indexes, stop=stop, measurements=measurements
    )
    return asyncio.run(work)


def held_out(*, seed: int, environment: int, count: int) -> list[int]:
    """Return the indices of the first `count` held-out problems of environment number `environment` of the run."""
    return [int.from_bytes(_derive(seed, environment, number)[:8], "big") >> 1 for number in range(count)]


def _indexes(
    environment: Environment, settings: EvaluationSettings, place: int, wanted: Sequence[int] | None
) -> Sequence[int]:
    """Return those `wanted` that environment number `place` has, or if None the held-out ones.

    Of a dataset's held-out rows the seed draws; raises EnvironmentFault where it has none.
    """
    rows = held_out_rows(environment)
    if rows is None:
        return held_out(seed=settings.seed, environment=place, count=settings.problems) if wanted is None else wanted
    if wanted is not None:
        return [index for index in wanted if index < rows.start]
    if not rows:
        raise EnvironmentFault(f"{environment.name} has no held-out rows to evaluate on", code="no_held_out_rows")
    return sorted(rows, key=lambda row: _derive(settings.seed, place, row))[: settings.problems]


def confidence(mean: float, count: int) -> tuple[float, float]:
    """Compute Wilson's 95 % interval (JASA 22, 1927) of a mean of `count` independent values in 0 .. 1.

    Derived for values 0 and 1, which spread most for their mean, so it is never too narrow for others. Samples of one
    problem are not independent; their mean counts once.
    """
    shrink = 1 + _Z_95**2 / count
    centre = (mean + _Z_95**2 / (2 * count)) / shrink
    half = _Z_95 / shrink * math.sqrt(max(mean * (1 - mean), 0) / count + _Z_95**2 / (4 * count**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _derive(seed: int, environment: int, number: int, *sample: int) -> bytes:
    numbers = (environment, number, *sample)
    parts = (seed.to_bytes(8, "big"), *(each.to_bytes(4, "big") for each in numbers))
    return derive("swarmproof/1 held out", *parts)


def _drawing(spec: RunSpec, settings: EvaluationSettings) -> RunSpec:
    """Return the run's rules with these settings, and the cheapest proofs, as nobody reads them."""
    temperature = spec.sampling.temperature if settings.temperature is None else settings.temperature
    return msgspec.structs.replace(
        spec,
        sampling=msgspec.structs.replace(spec.sampling, temperature=temperature or GREEDY_TEMPERATURE),
        proofs=ProofSpec(scheme="sketch/1", chunk_tokens=4096),
    )


async def _evaluate(
    policy: Path,
    spec: RunSpec,
    environments: Sequence[Environment],
    *,
    settings: EvaluationSettings,
    indexes: Sequence[int] | None,
    stop: Callable[[], bool],
    measurements: MeasuredBefore,
) -> list[TaskSet]:
    engine = settings.make_engine(spec)
    try:
        await engine.load(policy, version=0)
        found = []
        for environment_index, environment in enumerate(environments):
            rules = turn_rules(engine.policy, spec, environment_index)
            tasks = TaskSet(environment, engine.policy, settings, environment_index, indexes, rules=rules)
            await _draw(engine, tasks, spec.sampling_in(environment_index), stop, measurements)
            found.append(tasks)
    finally:
        await engine.close()
    return found


async def _draw(
    engine: Engine, tasks: TaskSet, sampling: SamplingSpec, stop: Callable[[], bool], measurements: MeasuredBefore
) -> None:
    requests = list(tasks.requests(sampling))
    for start in range(0, len(requests), IN_FLIGHT):
        if stop():
            raise Interrupted("the evaluation was stopped")
        batch = requests[start : start + IN_FLIGHT]
        outcomes = measurements.known(tasks.place, start, count=len(batch))
        if outcomes is None:
            outcomes = await asyncio.to_thread(tasks.judge, await engine.generate(batch))
            measurements.add(tasks.place, start, outcomes)
        tasks.note(outcomes)
        log.info("%s: %d of %d completions", tasks.environment.name, len(tasks.lengths), len(requests))


class TaskSet:
    """Problems of one environment, in order, and the outcome of their completions; held-out ones by default.

    `rewards` has one list per problem, of the completions that could be judged.
    """

    def __init__(
        self,
        environment: Environment,
        policy: Blueprint,
        settings: EvaluationSettings,
        environment_index: int,
        indexes: Sequence[int] | None = None,
        *,
        rules: TurnRules = RUN_RULES,
    ) -> None:
        self.environment = environment
        self.lengths: list[int] = []
        self.place = environment_index
        self._policy, self._settings, self._rules = policy, settings, rules
        indexes = _indexes(environment, settings, environment_index, indexes)
        self._problems: list[Problem] = [environment.problem(index) for index in indexes]
        self.rewards: list[list[float]] = [[] for _ in indexes]
        self._drawn = list(range(len(self._problems)))
        self._cut_off = 0

    def requests(self, sampling: SamplingSpec) -> Iterator[SampleRequest]:
        """Yield one request per completion, problem by problem; none for a prompt length the run does not allow."""
        for number, problem in enumerate(self._problems):
            prompt = tuple(render_prompt(self._policy, problem.prompt, special_tokens=sampling.special_tokens))
            if not 1 <= len(prompt) <= sampling.max_prompt_tokens:
                log.warning(
                    "problem %d of %s skipped: its prompt has %d tokens", number, self.environment.name, len(prompt)
                )
                self._drawn.remove(number)
                continue
            ask = asking(self._policy, self.environment, problem, sampling=sampling)
            for sample in range(self._settings.samples):
                seed = _derive(self._settings.seed, self.place, number, sample)[:SEED_BYTES]
                yield SampleRequest(prompt, seed, ask=ask, rules=self._rules)

    def judge(self, rollouts: Sequence[Rollout]) -> list[CompletionOutcome]:
        """Judge the next completions, in the order of the requests."""
        outcomes = []
        for at, rollout in enumerate(rollouts, len(self.lengths)):
            reward: float | None = None
            try:
                problem = self._problems[self._number(at)]
                reward = graded(self._policy, self.environment, problem, rollout.completion_ids, rules=self._rules)
            except NodeError as error:
                log.warning("completion of %s cannot be judged here: %s", self.environment.name, error)
            is_cut_off = not ends_whole(rollout.completion_ids, self._policy.eos_ids, self._rules)
            outcomes.append(CompletionOutcome(len(rollout.completion_ids), is_cut_off, reward))
        return outcomes

    def note(self, outcomes: Sequence[CompletionOutcome]) -> None:
        """Count the next completions, in the order of the requests."""
        for outcome in outcomes:
            number = self._number(len(self.lengths))
            self.lengths.append(outcome.tokens)
            self._cut_off += outcome.is_cut_off
            if outcome.reward is not None:
                self.rewards[number].append(outcome.reward)

    def _number(self, completion: int) -> int:
        """Return which problem a completion is of."""
        return self._drawn[completion // self._settings.samples]

    def measured(self, spec: RunSpec) -> EnvironmentScore:
        """Summarise, once every completion was judged."""
        means = [fmean(rewards) for rewards in self.rewards if rewards]
        reward = fmean(means) if means else None
        low, high = (None, None) if reward is None else confidence(reward, len(means))
        return EnvironmentScore(
            name=self.environment.name,
            weight=spec.environments[self.place].weight,
            problems=len(means),
            completions=len(self.lengths),
            unjudged=len(self.lengths) - sum(map(len, self.rewards)),
            reward=reward,
            low=low,
            high=high,
            tokens_mean=fmean(self.lengths or [0]),
            tokens_median=median(self.lengths or [0]),
            tokens_most=max(self.lengths, default=0),
            cut_off=self._cut_off / max(1, len(self.lengths)),
        )
