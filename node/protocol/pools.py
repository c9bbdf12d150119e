"""Pools of problems by difficulty, and the candidate of a slot (docs/protocol.md, section 5.1).

A slot's seed draws a pool, by the run's shares, and candidates, one after the other; the slot is for the first that
lies in the pool. A problem's pool at a policy follows from the log entries before that policy's own. So the operator
picks no problem, a node buys no choice of work, and whoever reads the log comes to the same candidate.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import accumulate

from msgspec import UnsetType

from node.protocol.messages import Lease
from node.protocol.run import PoolsSpec, ProblemsSpec, RunSpec
from node.protocol.slots import MOST_CANDIDATES, SlotProblem, slot_problem
from shardcast.wire import derive


class Pool(StrEnum):
    EASY = "easy"
    NORMAL = "normal"
    HARD = "hard"


def group_mean(rewards: Sequence[float]) -> float:
    """Return the mean reward of a group: the correctly rounded sum of its rewards by their number, in float64."""
    return math.fsum(rewards) / len(rewards)


def pool_of(mean: float | None, rules: PoolsSpec) -> Pool:
    """Return the pool of a problem whose last group earned `mean`; None where it had none yet."""
    if mean is None:
        return Pool.NORMAL
    if mean >= rules.easy_from:
        return Pool.EASY
    return Pool.HARD if mean <= rules.hard_to else Pool.NORMAL


def slot_pool(rules: PoolsSpec, *, run_id: str, manifest_digest: str, slot: int) -> Pool:
    """Return the pool from which `slot` is to have its problem."""
    drawn = derive(
        "swarmproof/1 slot pool", bytes.fromhex(run_id), bytes.fromhex(manifest_digest), slot.to_bytes(8, "big")
    )
    bounds = list(accumulate((rules.easy, rules.normal, rules.hard)))
    return list(Pool)[bisect_right(bounds, int.from_bytes(drawn[:8], "big") % bounds[-1])]


def has_pools(spec: RunSpec, environment: int) -> bool:
    """Return whether this environment (index) is a finite set in a run with pools."""
    finite = isinstance(spec.environments[environment].problems, ProblemsSpec)
    return finite and isinstance(spec.batch.pools, PoolsSpec)


def candidates(spec: RunSpec, *, run_id: str, manifest_digest: str, slot: int) -> Iterator[SlotProblem]:
    """Yield the candidate problems of `slot` in order; some may be equal."""
    for at in range(MOST_CANDIDATES):
        tried = slot_problem(spec, run_id=run_id, manifest_digest=manifest_digest, slot=slot, candidate=at)
        yield tried
        if not has_pools(spec, tried.environment):
            return


def has_candidate(spec: RunSpec, lease: Lease, *, run_id: str) -> bool:
    """Return whether a lease names a problem that its slot can be for, as far as can be told without the log: one in a
    run with pools alone, and another than the first where the problem is of a finite set.
    """
    if isinstance(lease.candidate, UnsetType):
        return not isinstance(spec.batch.pools, PoolsSpec)
    first = slot_problem(spec, run_id=run_id, manifest_digest=lease.manifest_digest, slot=lease.slot)
    return isinstance(spec.batch.pools, PoolsSpec) and (lease.candidate == 0 or has_pools(spec, first.environment))


def first_candidate(
    spec: RunSpec,
    *,
    run_id: str,
    manifest_digest: str,
    slot: int,
    mean_of: Callable[[SlotProblem], float | None],
) -> int:
    """Return the index of the slot's candidate: the first in its pool, or the last if none is.

    `mean_of` tells the mean reward of the last group on a problem that was admitted before the policy, None without.
    """
    rules, where = spec.batch.pools, {"run_id": run_id, "manifest_digest": manifest_digest}
    if not isinstance(rules, PoolsSpec):
        return 0
    wanted = slot_pool(rules, **where, slot=slot)
    for at, problem in enumerate(candidates(spec, **where, slot=slot)):
        if pool_of(mean_of(problem), rules) is wanted:
            return at
    return at


class PoolHistory:
    """Mean rewards of the log's admitted groups by problem, from which every policy's pools follow."""

    def __init__(self) -> None:
        self._heads: dict[SlotProblem, list[int]] = {}
        self._means: dict[SlotProblem, list[float]] = {}

    def note(self, problem: SlotProblem, mean: float, *, head: int) -> None:
        """Record a group on `problem` that was admitted while `head` was the newest policy."""
        heads = self._heads.setdefault(problem, [])
        means = self._means.setdefault(problem, [])
        if heads and heads[-1] == head:
            means[-1] = mean
        else:
            heads.append(head)
            means.append(mean)

    def mean_before(self, problem: SlotProblem, version: int) -> float | None:
        """Return the mean of the last group on `problem` admitted before policy `version`, or None."""
        at = bisect_left(self._heads.get(problem, ()), version)
        return self._means[problem][at - 1] if at else None
