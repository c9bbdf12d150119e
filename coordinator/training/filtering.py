"""Offline filtering: keep the problems that the first policy solves sometimes, but neither always nor never.

INTELLECT-2 (arXiv 2505.07291) trains on such problems: others yield groups without signal. The kept ones go into
run.toml (`environments.problems`), so that everybody draws slots from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from coordinator.training.evaluation import IN_FLIGHT, EvaluationSettings, judge_tasks
from coordinator.training.measured import NOTHING_MEASURED, MeasuredBefore
from node.engines.base import MakeEngine
from node.engines.torch import TorchEngine
from node.environments import NO_DATASETS
from node.protocol.run import EnvironmentSpec, ProblemsSpec, RunSpec
from shardcast.content import file_digest
from shardcast.wire import derive, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterSettings:
    """Measure problems 0 .. `count` - 1 with `samples` completions each; keep those with `lowest` <= rate <= `highest`.

    Raises ValueError for inverted bounds, and for too many completions.
    """

    count: int = 512
    samples: int = 8
    lowest: float = 0.1
    highest: float = 0.9
    seed: int = 0
    make_engine: MakeEngine = TorchEngine

    def __post_init__(self) -> None:
        if not 0 <= self.lowest <= self.highest <= 1:
            raise ValueError("pass rates must satisfy 0 <= lowest <= highest <= 1")
        self.drawing()

    def drawing(self) -> EvaluationSettings:
        """Return the evaluation settings, at the run's temperature."""
        return EvaluationSettings(
            problems=self.count, samples=self.samples, seed=self.seed, make_engine=self.make_engine
        )


class Filtered(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one environment: problems `kept`, `below` and `above` the bounds, and `unjudged` ones, which are not
    kept. `rate` is the mean pass rate, None without any.
    """

    name: str
    count: int
    kept: int
    below: int
    above: int
    unjudged: int
    rate: float | None
    bitmap: bytes


def filter_problems(
    policy: Path,
    *,
    spec: RunSpec,
    settings: FilterSettings,
    datasets: Mapping[str, Path] = NO_DATASETS,
    stop: Callable[[], bool] = lambda: False,
    measurements: MeasuredBefore = NOTHING_MEASURED,
) -> list[Filtered]:
    """Filter the first problems of each environment by the policy file `policy`; blocks and raises as
    `evaluate_policy`. Of a dataset, rows that are held out are no problems to be kept.
    """
    drawn = judge_tasks(
        policy,
        spec=spec,
        settings=settings.drawing(),
        datasets=datasets,
        indexes=range(settings.count),
        stop=stop,
        measurements=measurements,
    )
    rates = [[fmean(rewards) if rewards else None for rewards in tasks.rewards] for tasks in drawn]
    return [
        _filtered(environment, found, settings) for environment, found in zip(spec.environments, rates, strict=True)
    ]


def measured_digest(policy: Path, *, spec: RunSpec, settings: FilterSettings, engine: str) -> str:
    """Return the digest of what decides the outcomes of a measurement: all but how many problems, and the bounds.

    `engine` is its name with its settings, which change how numbers are rounded.
    """
    decisive = (settings.samples, settings.seed, IN_FLIGHT, engine, file_digest(policy))
    return derive("swarmproof/1 measured problems", encode(spec), msgspec.json.encode(decisive)).hex()


def bitmap_of(kept: Sequence[bool]) -> bytes:
    """Encode `kept` for `ProblemsSpec`: problem i is bit i mod 8 of byte i // 8, bit 0 the lowest."""
    number = sum(1 << at for at, is_kept in enumerate(kept) if is_kept)
    return number.to_bytes(-(-len(kept) // 8), "little")


def filtered_spec(spec: RunSpec, found: Sequence[Filtered]) -> RunSpec:
    """Return the run restricted to these problems; raises msgspec.ValidationError or ValueError for an invalid run."""
    environments = tuple(
        msgspec.structs.replace(environment, problems=ProblemsSpec(count=one.count, kept=one.bitmap))
        for environment, one in zip(spec.environments, found, strict=True)
    )
    return msgspec.structs.replace(spec, environments=environments)


def _filtered(environment: EnvironmentSpec, rates: Sequence[float | None], settings: FilterSettings) -> Filtered:
    judged = [rate for rate in rates if rate is not None]
    kept = [rate is not None and settings.lowest <= rate <= settings.highest for rate in rates]
    return Filtered(
        name=environment.name,
        count=len(rates),
        kept=sum(kept),
        below=sum(rate < settings.lowest for rate in judged),
        above=sum(rate > settings.highest for rate in judged),
        unjudged=len(rates) - len(judged),
        rate=fmean(judged) if judged else None,
        bitmap=bitmap_of(kept),
    )
