"""Offline filtering: of an environment's first problems, those that the first policy neither always nor never solves.

INTELLECT-2 (arXiv 2505.07291) trains on problems that its base model solves now and then: others have groups without
signal. What is kept goes into run.toml (`environments.problems`), so that everybody draws slots from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from coordinator.training.evaluation import EvaluationSettings, judged_tasks
from node.protocol.run import EnvironmentSpec, ProblemsSpec, RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterSettings:
    """Measure problems 0 .. `count` - 1 with `samples` completions each; keep those of `lowest` <= rate <= `highest`.

    Raises ValueError for bounds the wrong way round, and for more completions than can be asked for.
    """

    count: int = 512
    samples: int = 8
    lowest: float = 0.1
    highest: float = 0.9
    seed: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.lowest <= self.highest <= 1:
            raise ValueError("a pass rate lies from 0 to 1, the lowest first")
        self.drawing()

    def drawing(self) -> EvaluationSettings:
        """What is drawn, at the run's temperature."""
        return EvaluationSettings(problems=self.count, samples=self.samples, seed=self.seed, threads=self.threads)


class Filtered(msgspec.Struct, frozen=True, kw_only=True):
    """One environment: of `count` problems so many are `kept`, `below` and `above` the bounds, or could not be judged
    here (`unjudged`, which are not kept). `rate` is the mean of all pass rates, None without any."""

    name: str
    count: int
    kept: int
    below: int
    above: int
    unjudged: int
    rate: float | None
    bitmap: bytes


def filter_problems(
    policy: Path, *, spec: RunSpec, settings: FilterSettings, stop: Callable[[], bool] = lambda: False
) -> list[Filtered]:
    """Measure the policy file `policy` on the first problems of each environment; blocks, and raises, as
    `evaluate_policy` does."""
    drawn = judged_tasks(policy, spec=spec, settings=settings.drawing(), indexes=range(settings.count), stop=stop)
    rates = [[fmean(rewards) if rewards else None for rewards in tasks.rewards] for tasks in drawn]
    return [
        _filtered(environment, found, settings) for environment, found in zip(spec.environments, rates, strict=True)
    ]


def bitmap_of(kept: Sequence[bool]) -> bytes:
    """`kept` as `ProblemsSpec` has it: problem i is bit i mod 8 of byte i // 8, bit 0 the lowest."""
    number = sum(1 << at for at, is_kept in enumerate(kept) if is_kept)
    return number.to_bytes(-(-len(kept) // 8), "little")


def filtered_spec(spec: RunSpec, found: Sequence[Filtered]) -> RunSpec:
    """The run with these problems alone; raises msgspec.ValidationError or ValueError for what no run can have."""
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
