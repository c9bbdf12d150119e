"""Fit the levels of honest work from samples (`node.protocol.evidence`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from itertools import chain, pairwise

import msgspec

from node.protocol.evidence import STATISTICS, Total, drift_limit, evidence, total
from node.protocol.run import HonestSpec, LevelSpec, LimitsSpec, ProofSpec
from node.verification.deviations import Deviations

CLIP_QUANTILE = 0.995
"""Values are clipped at this quantile of the honest ones, so that one token cannot decide about a group."""

MARGIN_CLIP_MEDIANS = 4.0
"""Margins are mostly 0; they are clipped at this multiple of the median of the nonzero ones."""

MARGIN_MEDIANS = 80.0
"""Multiple of that median one token of an honest rollout may lose: the tail is heavy."""

RULE_OF_THREE = 3.0
"""Rule of three: what did not occur in n values may still occur in 3 of n (95 %). Completions of one prompt may be
identical, so in 3 of n groups it may occur once in each of them.
"""

MEAN_STANDARD_ERRORS = 3.0
"""Standard errors by which a mean may exceed its measured value."""

MAX_SURPRISE_NATS = 3.0
"""Nats by which the least likely of n honest sums may exceed the expected log n."""

ROUTED_HEADROOM = 1.5
"""Multiple of the farthest honest sum of a policy with experts that has to be accepted; of single values its square.

Where rounding has a router choose others, all that attends to the token deviates: seldom, and by far more than a normal
distribution of what was seen would have it (docs/adr/0033-routing-is-not-carried.md).
"""

ROUTED_UNSUSPECTED = frozenset({"int8"})
"""Weights that no group of a policy with experts is compared with.

Eight bits have a router choose another expert where other rounding does, so that an honest group may go that way
(docs/adr/0033-routing-is-not-carried.md).
"""

HEADROOM = 2.0
"""Limits of single values are this multiple of the largest honest value seen."""

MIN_LIMITS = {
    "exponent_mismatches": 4.0,
    "mantissa_mean": 0.05,
    "mantissa_median": 0.5,
    "sketch_distance": 1.2,
    "token_margin": 1e-3,
    "rollout_margin_mean": 1e-4,
    "logprob_error": 2e-4,
}
"""Lower bounds of the limits, for other machines of the same kind."""

Group = Sequence[Deviations]


def single_value_limits(proofs: ProofSpec) -> list[str]:
    """List the single-value limits that apply to these proofs."""
    useless = set() if proofs.has_toploc else {"exponent_mismatches", "mantissa_mean", "mantissa_median"}
    useless |= set() if proofs.has_sketch else {"sketch_distance"}
    return [name for name in MIN_LIMITS if name not in useless]


def fit(*workers: Sequence[Group], false_rejections: float, parts: int = 1, headroom: float = 1.0) -> HonestSpec:
    """Fit the level of each statistic that the groups have values of; at least two groups per worker.

    Each worker is one machine and kernel, whose deviation never averages out, so levels bound every worker instead of
    their mixture: mean, variance and reach are the largest of any. The shared variance may be reduced by a worker's
    lower mean; the bound holds for each worker at `false_rejections`, and for anything likelier.

    A worker's groups consist of `parts` of equal size, drawn with different batch sizes, for which kernels round
    differently. A worker that always uses the worst of them is honest too, so the mean is that of its highest part.

    Finally, where these levels make a sampled group or completion less likely than MAX_SURPRISE_NATS allows, the shared
    variance is widened; so it is until what deviates `headroom` times as far would be accepted. Raises ValueError for
    too few groups.
    """
    if not workers or any(len(groups) < 2 for groups in workers):
        raise ValueError("fitting levels needs at least two groups per worker")
    spreads = math.sqrt(2 * drift_limit(LimitsSpec(false_rejections=false_rejections)))
    # Evidence grows with the square of a deviation, or slower.
    most = math.inf if headroom == 1 else -math.log(false_rejections) / headroom**2
    found = [[[one.statistics for one in group] for group in groups] for groups in workers]
    values = {name: [[[one[name] for one in group] for group in groups] for groups in found] for name in STATISTICS}
    levels = {name: _fit(every, name, spreads=spreads, parts=parts, most=most) for name, every in values.items()}
    # Statistics that the run's proofs lack keep their defaults.
    return HonestSpec(**{name: level for name, level in levels.items() if level is not None})


@dataclass(frozen=True, slots=True)
class _Moments:
    mean: float
    reach: float
    variance: float
    shared_variance: float


def _fit(
    workers: Sequence[Sequence[Sequence[Sequence[float]]]], name: str, *, spreads: float, parts: int, most: float
) -> LevelSpec | None:
    every = [sorted(value for group in groups for values in group for value in values) for groups in workers]
    if not all(every):
        return None
    largest = max(_clip_at(values, name) for values in every)
    found = [_moments(groups, largest, parts=parts) for groups in workers]
    mean = max(one.mean for one in found)
    level = LevelSpec(
        mean=mean,
        variance=max(one.variance for one in found),
        largest=mean + max(one.reach for one in found),
        # A normal quantile `spreads` deviations above a lower mean is that of a narrower normal above the largest.
        shared_variance=max(max(0.0, one.shared_variance**0.5 - (mean - one.mean) / spreads) ** 2 for one in found),
    )
    sums = [one for groups in workers for group in groups for one in _sums(group, level)]
    return _widen_until_plausible(level, sums, most=most)


def _sums(group: Sequence[Sequence[float]], level: LevelSpec) -> list[Total]:
    """Sum what is judged of a group: each completion, and all together."""
    return [total(values, level) for values in (*group, list(chain.from_iterable(group)))]


def _widen_until_plausible(level: LevelSpec, sums: Sequence[Total], *, most: float) -> LevelSpec:
    """Widen the variance until every sum is plausible at the corrected significance level, and shows `most` nats."""
    allowed = min(math.log(len(sums)) + MAX_SURPRISE_NATS, most)
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
    """Estimate the variance within groups (of completion sums), the variance shared by groups, and the mean of the
    highest part plus its error margin.
    """
    sums = [[(len(values), math.fsum(min(largest, value) for value in values)) for values in group] for group in groups]
    count = sum(n for group in sums for n, _ in group)
    mean = math.fsum(s for group in sums for _, s in group) / count
    within, degrees, shared = 0.0, 0, []
    for group in sums:
        n = sum(n for n, _ in group)
        group_mean = math.fsum(s for _, s in group) / n
        within += math.fsum((s - k * group_mean) ** 2 / k for k, s in group if k)
        degrees += max(0, len(group) - 1)
    reach = max(largest - mean, 1e-6)
    observed, unobserved = within / max(1, degrees), RULE_OF_THREE / count * reach**2
    variance = max(observed, unobserved, 1e-18)
    for group in sums:
        n = sum(n for n, _ in group)
        deviation = math.fsum(s for _, s in group) - n * mean
        shared.append((deviation**2 - n * variance) / n**2)
    once_each = reach * sum(map(len, groups)) / count
    shared_variance = max(
        0.0, statistics.fmean(shared), RULE_OF_THREE / len(sums) * once_each**2 if observed < unobserved else 0.0
    )
    bounds = [len(sums) * part // parts for part in range(parts + 1)]
    highest = max((_mean(sums[start:end]) for start, end in pairwise(bounds)), default=mean)
    error = MEAN_STANDARD_ERRORS * math.sqrt(variance / count + shared_variance / len(sums))
    return _Moments(mean=max(mean, highest) + error, reach=reach, variance=variance, shared_variance=shared_variance)


def _mean(sums: Sequence[Sequence[tuple[int, float]]]) -> float:
    """Return the mean of values given by (count, sum) pairs; -inf without any."""
    count = sum(n for group in sums for n, _ in group)
    return math.fsum(s for group in sums for _, s in group) / count if count else -math.inf


def fit_limits(*workers: Sequence[Group], false_rejections: float, parts: int = 1, headroom: float = 1.0) -> LimitsSpec:
    """Fit the levels, and single-value limits with HEADROOM above the largest honest value.

    Of a policy whose honest sums may be `headroom` times as far apart (see `fit`), a single value may be its square.

    One token may lose MARGIN_MEDIANS medians, and a rollout of ordinary length may have one such token, if the defaults
    allow it. Sketch distances saturate for unrelated states, so twice an honest one may mean nothing: the default
    applies unless it leaves less than half as much headroom.
    """
    honest = fit(*workers, false_rejections=false_rejections, parts=parts, headroom=headroom)
    default = LimitsSpec()
    levels = LimitsSpec(honest=honest, false_rejections=false_rejections)
    every = [one for groups in workers for group in groups for one in group]
    figures = [one.figures(levels) for one in every]

    def most(figure: str) -> float:
        largest: float = max(getattr(one, figure) for one in figures)
        return largest

    multiple = HEADROOM * headroom**2

    def above(name: str) -> float:
        return max(MIN_LIMITS[name], multiple * most(name))

    lost = [margin for one in every for margin in one.margins if margin > 0]
    tail = min(default.token_margin, MARGIN_MEDIANS * statistics.median(lost) if lost else 0.0)
    token_margin = max(above("token_margin"), tail)
    one_token = min(default.rollout_margin_mean, token_margin / statistics.median(len(one.margins) for one in every))
    sketch = most("sketch_distance")
    return LimitsSpec(
        exponent_mismatches=above("exponent_mismatches"),
        mantissa_mean=above("mantissa_mean"),
        mantissa_median=above("mantissa_median"),
        sketch_distance=min(above("sketch_distance"), max(default.sketch_distance, 1.5 * sketch)),
        token_margin=token_margin,
        rollout_margin_mean=max(MIN_LIMITS["rollout_margin_mean"], multiple * most("margin_mean"), one_token),
        logprob_error=above("logprob_error"),
        false_rejections=false_rejections,
        honest=honest,
    )


def rounded(limits: LimitsSpec) -> LimitsSpec:
    """Round limits to few digits, never narrower."""
    levels = {name: getattr(limits.honest, name) for name in STATISTICS}
    honest = HonestSpec(**{name: level and _rounded_level(level) for name, level in levels.items()})
    return msgspec.structs.replace(
        limits, honest=honest, **{name: round_up(getattr(limits, name), digits=2) for name in MIN_LIMITS}
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
    """Return the smallest number of `digits` significant digits that is not below `value` (non-negative)."""
    if value == 0:
        return 0.0
    places = digits - 1 - math.floor(math.log10(value))
    # On the decimal form: the float 0.1 exceeds 0.1, and would become 0.11.
    return float(Decimal(repr(value)).quantize(Decimal(1).scaleb(-places), rounding=ROUND_CEILING))


def _clip_at(ordered: Sequence[float], name: str) -> float:
    if name == "margin":
        lost = [value for value in ordered if value > 0]
        return MARGIN_CLIP_MEDIANS * statistics.median(lost) if lost else 1e-3
    if name == "far":
        return 1.0
    return ordered[min(len(ordered) - 1, int(CLIP_QUANTILE * len(ordered)))]
