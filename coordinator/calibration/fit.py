"""Levels of honest work from samples of it, and how well they hold (`node.protocol.evidence`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from itertools import chain, pairwise

import msgspec

from node.measurement import Deviations
from node.protocol.evidence import STATISTICS, Total, drift_limit, evidence, total
from node.protocol.run import HonestSpec, LevelSpec, LimitsSpec, ProofSpec

CUT = 0.995
"""Values above this quantile of the honest ones count as it: one token cannot speak for a group."""

MARGIN_CUT = 4.0
"""Margins are 0 nearly everywhere; they are cut at so many times the median of those that are not."""

MARGIN_MEDIANS = 80.0
"""By so many times that median one token of an honest rollout may lose: the tail is heavy."""

UNSEEN = 3.0
"""What did not happen in n values may still happen in 3 of n (the rule of three, at 95 %). Completions of one prompt
may be the very same, so in 3 of n groups it may happen once to each of them.
"""

MEAN_ERRORS = 3.0
"""Standard errors by which a mean may be higher than it was measured."""

SURPRISE = 3.0
"""Nats by which the unlikeliest of n honest sums may be beyond what is expected of it, log n."""

TIMES = 2.0
"""What is judged alone may be so many times the largest honest value that was seen."""

LEAST = {
    "exponent_mismatches": 4.0,
    "mantissa_mean": 0.05,
    "mantissa_median": 0.5,
    "sketch_distance": 1.2,
    "token_margin": 1e-3,
    "rollout_margin_mean": 1e-4,
    "logprob_error": 2e-4,
}
"""Limits below which another machine of the same kind would suffer, though nothing of the sort was seen on this one."""

Group = Sequence[Deviations]


def judged_alone(proofs: ProofSpec) -> list[str]:
    """The limits of single values that mean something for these proofs."""
    useless = set() if proofs.has_toploc else {"exponent_mismatches", "mantissa_mean", "mantissa_median"}
    useless |= set() if proofs.has_sketch else {"sketch_distance"}
    return [name for name in LEAST if name not in useless]


def fit(*workers: Sequence[Group], false_rejections: float, parts: int = 1) -> HonestSpec:
    """The level of each statistic that the groups have values of; at least two groups of each worker.

    A worker has one machine and one kernel, so that what sets it apart from the others never averages out: the
    levels are such as none of `workers` exceeds, and not those of the mixture. Mean, variance and reach are the
    largest of any. What a worker's groups share may be larger by the room that its lower mean leaves it: the bound
    holds for each worker, at `false_rejections` and for whatever is likelier.

    A worker's groups come in so many `parts` of equal size, one behind the other, which it drew in different ways: with
    few rows at a time and with many, for which kernels round otherwise. Who always works in the worst of them is as
    honest, so the mean is that of a worker's highest part.

    The sample has the last word: where these levels make a group or a completion of it unlikelier than `SURPRISE`
    allows, the values of a group share more than their mean square shows, and that is made larger.
    """
    if not workers or any(len(groups) < 2 for groups in workers):
        raise ValueError("levels need two groups or more")
    spreads = math.sqrt(2 * drift_limit(LimitsSpec(false_rejections=false_rejections)))
    values = {
        name: [[[one.statistics[name] for one in group] for group in groups] for groups in workers]
        for name in STATISTICS
    }
    levels = {name: _fit(every, name, spreads=spreads, parts=parts) for name, every in values.items()}
    # What the run's proofs do not have keeps its default.
    return HonestSpec(**{name: level for name, level in levels.items() if level is not None})


@dataclass(frozen=True, slots=True)
class _Moments:
    mean: float
    reach: float
    variance: float
    shared_variance: float


def _fit(
    workers: Sequence[Sequence[Sequence[Sequence[float]]]], name: str, *, spreads: float, parts: int
) -> LevelSpec | None:
    every = [sorted(value for group in groups for values in group for value in values) for groups in workers]
    if not all(every):
        return None
    largest = max(_cut(values, name) for values in every)
    found = [_moments(groups, largest, parts=parts) for groups in workers]
    mean = max(one.mean for one in found)
    level = LevelSpec(
        mean=mean,
        variance=max(one.variance for one in found),
        largest=mean + max(one.reach for one in found),
        # A normal quantile `spreads` deviations above a lower mean is one of a narrower normal above the largest.
        shared_variance=max(max(0.0, one.shared_variance**0.5 - (mean - one.mean) / spreads) ** 2 for one in found),
    )
    return _believable(level, [one for groups in workers for group in groups for one in _sums(group, level)])


def _sums(group: Sequence[Sequence[float]], level: LevelSpec) -> list[Total]:
    """What is judged of a group: each completion, and all of them together."""
    return [total(values, level) for values in (*group, list(chain.from_iterable(group)))]


def _believable(level: LevelSpec, sums: Sequence[Total]) -> LevelSpec:
    """`level`, made so wide that none of `sums` is too unlikely to be among so many."""
    allowed = math.log(len(sums)) + SURPRISE
    unlikely = [one for one in sums if evidence(one, level) > allowed]
    if not unlikely:
        return level

    def wider(shared_variance: float) -> LevelSpec:
        return msgspec.structs.replace(level, shared_variance=shared_variance)

    def holds(shared_variance: float) -> bool:
        return all(evidence(one, wider(shared_variance)) <= allowed for one in unlikely)

    low, high = level.shared_variance, max(level.variance, level.shared_variance)
    while not holds(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return wider(high)


def _moments(groups: Sequence[Sequence[Sequence[float]]], largest: float, *, parts: int) -> _Moments:
    """The variance within groups, of sums of completions, and what the groups' means add to it; the mean of the highest
    part, and by how much it may be higher than it was seen.
    """
    sums = [[(len(values), math.fsum(min(largest, value) for value in values)) for values in group] for group in groups]
    count = sum(n for group in sums for n, _ in group)
    mean = math.fsum(s for group in sums for _, s in group) / count
    within, degrees, shared = 0.0, 0, []
    for group in sums:
        n = sum(n for n, _ in group)
        own = math.fsum(s for _, s in group) / n
        within += math.fsum((s - k * own) ** 2 / k for k, s in group if k)
        degrees += max(0, len(group) - 1)
    reach = max(largest - mean, 1e-6)
    seen, unseen = within / max(1, degrees), UNSEEN / count * reach**2
    variance = max(seen, unseen, 1e-18)
    for group in sums:
        n = sum(n for n, _ in group)
        off = math.fsum(s for _, s in group) - n * mean
        shared.append((off**2 - n * variance) / n**2)
    once_each = reach * sum(map(len, groups)) / count
    shared_variance = max(0.0, statistics.fmean(shared), UNSEEN / len(sums) * once_each**2 if seen < unseen else 0.0)
    bounds = [len(sums) * part // parts for part in range(parts + 1)]
    highest = max((_mean(sums[start:end]) for start, end in pairwise(bounds)), default=mean)
    error = MEAN_ERRORS * math.sqrt(variance / count + shared_variance / len(sums))
    return _Moments(mean=max(mean, highest) + error, reach=reach, variance=variance, shared_variance=shared_variance)


def _mean(sums: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Of the values whose numbers and sums these are; -inf of none."""
    count = sum(n for group in sums for n, _ in group)
    return math.fsum(s for group in sums for _, s in group) / count if count else -math.inf


def fit_limits(*workers: Sequence[Group], false_rejections: float, parts: int = 1) -> LimitsSpec:
    """The levels, as `fit` finds them, and for what is judged alone, the largest honest value with as much to spare.

    One token may lose by `MARGIN_MEDIANS` medians, and a rollout of ordinary length may have one such token, if the
    defaults allow that. Sketch distances end where states are unrelated, so that twice an honest one may mean
    nothing: there the default counts, unless it leaves less than half as much to spare.
    """
    honest, default = fit(*workers, false_rejections=false_rejections, parts=parts), LimitsSpec()
    levels = LimitsSpec(honest=honest, false_rejections=false_rejections)
    every = [one for groups in workers for group in groups for one in group]
    figures = [one.figures(levels) for one in every]

    def most(figure: str) -> float:
        largest: float = max(getattr(one, figure) for one in figures)
        return largest

    def twice(name: str) -> float:
        return max(LEAST[name], TIMES * most(name))

    lost = [margin for one in every for margin in one.margins if margin > 0]
    tail = min(default.token_margin, MARGIN_MEDIANS * statistics.median(lost) if lost else 0.0)
    token_margin = max(twice("token_margin"), tail)
    one_token = min(default.rollout_margin_mean, token_margin / statistics.median(len(one.margins) for one in every))
    sketch = most("sketch_distance")
    return LimitsSpec(
        exponent_mismatches=twice("exponent_mismatches"),
        mantissa_mean=twice("mantissa_mean"),
        mantissa_median=twice("mantissa_median"),
        sketch_distance=min(twice("sketch_distance"), max(default.sketch_distance, 1.5 * sketch)),
        token_margin=token_margin,
        rollout_margin_mean=max(LEAST["rollout_margin_mean"], TIMES * most("margin_mean"), one_token),
        logprob_error=twice("logprob_error"),
        false_rejections=false_rejections,
        honest=honest,
    )


def rounded(limits: LimitsSpec) -> LimitsSpec:
    """The same limits in few digits, none of them narrower."""
    levels = {name: getattr(limits.honest, name) for name in STATISTICS}
    honest = HonestSpec(**{name: level and _rounded_level(level) for name, level in levels.items()})
    return msgspec.structs.replace(
        limits, honest=honest, **{name: round_up(getattr(limits, name), digits=2) for name in LEAST}
    )


def _rounded_level(level: LevelSpec) -> LevelSpec:
    places = 3 - math.floor(math.log10(level.largest - level.mean))
    mean = math.ceil(level.mean * 10**places) / 10**places
    return LevelSpec(
        mean=mean,
        variance=round_up(level.variance, digits=4),
        largest=round(mean + round_up(level.largest - level.mean, digits=4), places),
        shared_variance=round_up(level.shared_variance, digits=4),
    )


def round_up(value: float, *, digits: int) -> float:
    """The smallest number of so many significant digits that is not below `value`, which is not negative."""
    if value == 0:
        return 0.0
    places = digits - 1 - math.floor(math.log10(value))
    # Of its decimal form: 0.1 itself is a little more than 0.1, and would become 0.11.
    return float(Decimal(repr(value)).quantize(Decimal(1).scaleb(-places), rounding=ROUND_CEILING))


def _cut(ordered: Sequence[float], name: str) -> float:
    if name == "margin":
        lost = [value for value in ordered if value > 0]
        return MARGIN_CUT * statistics.median(lost) if lost else 1e-3
    if name == "far":
        return 1.0
    return ordered[min(len(ordered) - 1, int(CUT * len(ordered)))]


def pooled(groups: Sequence[Group], *, size: int) -> Iterator[list[Deviations]]:
    """Every `size` groups as one; what is left over is dropped."""
    for start in range(0, len(groups) - size + 1, size):
        yield list(chain.from_iterable(groups[start : start + size]))
