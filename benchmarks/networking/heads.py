"""Heads: policies that are recorded one after the other, when each node knew of them, and what that cost."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.networking.run import Run
from benchmarks.timing import quantile

IN_TIME_SECONDS: Final = 2.0
SETTLE_SECONDS: Final = 3.0
"""After the last head, for those who are late."""

MEAN_GAP_SECONDS: Final = 0.75
BURST: Final = 20
NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Spread:
    """When each of some nodes knew each of some heads: `seconds`, or NEVER; one entry for each pair."""

    seconds: Sequence[float]

    def quantile_ms(self, share: float) -> float | None:
        """Return what `share` of the pairs do not exceed; None where that many never came."""
        found = 1000 * quantile(self.seconds, share)
        return None if found == NEVER else round(found, 1)

    @property
    def reached_share(self) -> float:
        """Return the share of the pairs within two seconds."""
        return sum(one <= IN_TIME_SECONDS for one in self.seconds) / len(self.seconds)


def spread(published: Sequence[tuple[int, float]], seen: Sequence[Sequence[Sequence[float]]]) -> Spread:
    """Compute when each node knew each head.

    `published` has versions and moments; `seen` for each node versions and when it first knew them, ascending. A node
    that knows a newer head counts.
    """
    seconds = []
    for heads in seen:
        for version, at in published:
            seconds.append(next((then - at for known, then in heads if known >= version), NEVER))
    return Spread(seconds)


def publish(run: Run, count: int, rng: random.Random) -> list[tuple[int, float]]:
    """Record policies at moments drawn at random, half of the mean gap to one and a half of it apart."""
    published = []
    for _ in range(count):
        time.sleep(MEAN_GAP_SECONDS * rng.uniform(0.5, 1.5))
        published.append(run.publish())
    return published


def published_and_seen(
    run: Run, count: int, rng: random.Random, *, settle_seconds: float = SETTLE_SECONDS
) -> tuple[Spread, list[dict[str, Any]]]:
    """Publish heads; return when the live nodes knew them, and the nodes' reports after it."""
    published = publish(run, count, rng)
    time.sleep(settle_seconds)
    reports = run.reports()
    return spread(published, heads_of(reports)), reports


def heads_of(reports: Sequence[dict[str, Any]]) -> list[list[list[float]]]:
    """Return each node's heads."""
    return [report["heads"] for report in reports]


def burst(run: Run) -> Spread:
    """Publish many heads at once; return when each node knew the last of them."""
    published = [run.publish() for _ in range(BURST)]
    time.sleep(SETTLE_SECONDS)
    return spread(published[-1:], heads_of(run.reports()))


@dataclass(frozen=True, slots=True)
class Span:
    """Reports of the same nodes before and after a while."""

    before: Sequence[dict[str, Any]]
    after: Sequence[dict[str, Any]]
    seconds: float

    def per_second(self, what: str) -> float:
        """Return how much of `what` a node used in a second, on average."""
        used = [_number(new, what) - _number(old, what) for old, new in zip(self.before, self.after, strict=True)]
        return sum(used) / len(used) / self.seconds


@dataclass(frozen=True, slots=True)
class Costs:
    """Mean cost of a head to a node, beyond its idle cost."""

    cpu_ms: float
    frames: float
    sent_bytes: float
    idle_cpu_ms_per_s: float


def costs(idle: Span, busy: Span, *, heads: int) -> Costs:
    """Compute the costs of a head from an idle and a busy span."""

    def per_head(what: str) -> float:
        return (busy.per_second(what) - idle.per_second(what)) * busy.seconds / heads

    return Costs(
        cpu_ms=1000 * per_head("cpu_s"),
        frames=per_head("frames"),
        sent_bytes=per_head("sent_bytes"),
        idle_cpu_ms_per_s=1000 * idle.per_second("cpu_s"),
    )


def _number(report: dict[str, Any], what: str) -> float:
    return float(report["network"]["frames"]["sent"] if what == "frames" else report[what])
