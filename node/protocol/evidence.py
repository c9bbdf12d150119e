"""Evidence of many small deviations together, and its drift along a node's slots (docs/protocol.md, section 7.3).

A chunk, or a token, of an honest worker deviates from the verifier's own numbers by rounding. One of them shows
little. `evidence` says what n of them show, in nats: honest values whose level the run knows (`LevelSpec`) sum up to so
much, or to more, with a probability of at most exp(-evidence). It is Bennett's inequality (G. Bennett, Probability
inequalities for the sum of independent random variables, JASA 57, 1962), which needs a mean, a variance and a
largest value, holds for every n, and is what a Poisson limit is for rare values. What a group's values share (one
prompt, one machine) is a variance of its own, which does not average out within the group.

`Drift` is the same bound along a node's slots, in the order of the log: a CUSUM of its exponential martingale
(an e-detector: Shin, Ramdas, Rinaldo, arXiv 2203.03532). An honest node is stopped once in at least
1 / `limits.false_rejections` slots on average, however long it works, and nobody saves up credit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from node.protocol.reasons import Reason
from node.protocol.run import LevelSpec, LimitsSpec
from shardcast.wire import Count, Wire

STATISTICS = {
    "exponents": Reason.PROOF_MISMATCH,
    "mantissa": Reason.PROOF_MISMATCH,
    "sketch": Reason.PROOF_MISMATCH,
    "far": Reason.PROOF_MISMATCH,
    "margin": Reason.WRONG_TOKEN,
    "logprob": Reason.WRONG_LOGPROB,
}
"""The statistics in the order in which they are judged, with the reason of a rejection."""

FAR_STEPS = 3.0
"""A token begins to be far from its sketch at so many steps, and is one step later: of unrelated states 97 % begin to
be, and 80 % are; hardly any honest ones.
"""

DRIFT_SPREADS = {"": 0.1, "_fast": 1.0}
"""The shifts that a drift is looked for by, in standard deviations of one value: a small one in every token, and a
large one, or a few tokens that are far out. By what a field of `Drift` is called after its statistic.
"""

DRIFT_MEMORY = 1.25
"""Cap of a drift in units of its limit, so that a repaired node recovers."""


class Total(Wire, frozen=True):
    """`count` values and their sum, each cut to the level's largest."""

    count: Count = 0
    sum: float = 0.0


class Totals(Wire, frozen=True):
    """What the rows of a group that were measured sum up to; 0 of 0 where the run knows no level.

    Per chunk: `exponents` (mismatches) and `mantissa` (the mean error). Per token: `sketch` (`sketch_value`), `far`
    (`far_value`), `margin`, and `logprob` (the absolute error).
    """

    exponents: Total = Total()
    mantissa: Total = Total()
    sketch: Total = Total()
    far: Total = Total()
    margin: Total = Total()
    logprob: Total = Total()


class Drift(Wire, frozen=True):
    """How far a node's slots have drifted, for each statistic and each of `DRIFT_SPREADS`, in nats."""

    exponents: float = 0.0
    mantissa: float = 0.0
    sketch: float = 0.0
    far: float = 0.0
    margin: float = 0.0
    logprob: float = 0.0
    exponents_fast: float = 0.0
    mantissa_fast: float = 0.0
    sketch_fast: float = 0.0
    far_fast: float = 0.0
    margin_fast: float = 0.0
    logprob_fast: float = 0.0


def sketch_value(distance: float) -> float:
    """Return a token's sketch statistic: the logarithm of its distance, so that outliers do not dominate."""
    return math.log(distance + 0.3)


def far_value(distance: float) -> float:
    """Return a token's `far` statistic in [0, 1]; continuous, so that rounding cannot flip it."""
    return min(1.0, max(0.0, distance - FAR_STEPS))


def total(values: Iterable[float], level: LevelSpec | None) -> Total:
    """Return count and sum of `values`, each cut to the level's largest, NaN included."""
    if level is None:
        return Total()
    # In this order: `min` takes its first argument where the second is NaN.
    cut = [min(level.largest, value) for value in values]
    return Total(count=len(cut), sum=math.fsum(cut))


def add(totals: Iterable[Totals]) -> Totals:
    """Return the sum of several rollouts' totals."""
    each = list(totals)
    return Totals(
        **{
            name: Total(
                count=sum(getattr(one, name).count for one in each),
                sum=math.fsum(getattr(one, name).sum for one in each),
            )
            for name in STATISTICS
        }
    )


SMALL_RATIO = 1e-4
"""Below this ratio, three terms of the series are exact to 14 digits."""


def evidence(seen: Total, level: LevelSpec | None) -> float:
    """Return -log of the bound on honest values' summing up to so much (nats); 0.0 at or below their mean."""
    if level is None or seen.count == 0:
        return 0.0
    reach = level.largest - level.mean
    excess = seen.sum - seen.count * level.mean
    if excess <= 0:
        return 0.0
    variance = _variance(seen, level)
    return seen.count * variance / reach**2 * _bennett(excess * reach / (seen.count * variance))


def _bennett(ratio: float) -> float:
    """Return (1 + ratio) log(1 + ratio) - ratio, for ratio >= 0."""
    if ratio < SMALL_RATIO:
        # The closed form cancels catastrophically there.
        return ratio * ratio * (1 / 2 - ratio / 6 + ratio * ratio / 12)
    # In this form an infinite ratio gives infinity and not NaN.
    return math.log1p(ratio) + ratio * (math.log1p(ratio) - 1)


def _variance(seen: Total, level: LevelSpec) -> float:
    """Return the sum's variance per value; the shared part does not average out within a group."""
    return level.variance + seen.count * level.shared_variance


def evidences(totals: Totals, *, limits: LimitsSpec) -> Iterator[tuple[str, float]]:
    """Yield each statistic with its evidence in nats."""
    for name in STATISTICS:
        yield name, evidence(getattr(totals, name), getattr(limits.honest, name))


def evidence_limit(limits: LimitsSpec) -> float:
    """Return the evidence, in nats, that honest work exceeds with at most the run's probability."""
    return -math.log(limits.false_rejections)


def drift_limit(limits: LimitsSpec) -> float:
    """Return the limit of a drift in nats, with a union bound over all fields of `Drift`."""
    return evidence_limit(limits) + math.log(len(STATISTICS) * len(DRIFT_SPREADS))


def drifts(drift: Drift) -> Iterator[tuple[str, float]]:
    """Yield each statistic with its drift in nats."""
    for name in STATISTICS:
        yield name, max(getattr(drift, name + suffix) for suffix in DRIFT_SPREADS)


def follow(drift: Drift, totals: Totals, *, limits: LimitsSpec) -> Drift:
    """Return a node's drift after one more slot."""
    most = DRIFT_MEMORY * drift_limit(limits)
    values = {}
    for name in STATISTICS:
        seen, level = getattr(totals, name), getattr(limits.honest, name)
        for suffix, spreads in DRIFT_SPREADS.items():
            gained = _gain(seen, level, spreads=spreads)
            values[name + suffix] = min(most, max(getattr(drift, name + suffix), 0.0) + gained)
    return Drift(**values)


def _gain(seen: Total, level: LevelSpec | None, *, spreads: float) -> float:
    """Return the log of one slot's factor in the martingale, whose mean is at most 1 for an honest node."""
    if level is None:
        return 0.0
    reach, variance = level.largest - level.mean, _variance(seen, level)
    # The exponent that gains most where the mean has moved by so much, and Bennett's bound on what it costs.
    ratio = reach * spreads / math.sqrt(variance)
    rate = math.log1p(ratio) / reach
    cost = variance / reach**2 * (ratio - math.log1p(ratio))
    return rate * (seen.sum - seen.count * level.mean) - seen.count * cost
