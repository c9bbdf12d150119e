"""Who is caught: groups of rollouts judged by a run's limits, as a verifier and the log would judge them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.calibration.fit import Group
from node.protocol.admission import Finding, judge, judge_drift, judge_group
from node.protocol.evidence import Drift, add, follow
from node.protocol.run import LimitsSpec


@dataclass(slots=True)
class Caught:
    """Of one worker's slots: how many rollouts and groups were rejected, each by itself, and what for.

    `first` is the slot, from 1, at which the node was first rejected, its drift included, `first_drifted` the one at
    which its drift was first over the limit; None if it never was.
    """

    rollouts: int = 0
    rejected_rollouts: int = 0
    groups: int = 0
    rejected_groups: int = 0
    drifted_groups: int = 0
    first: int | None = None
    first_drifted: int | None = None
    figures: Counter[str] = field(default_factory=Counter)

    @property
    def rollout_share(self) -> float:
        """Of rollouts that alone lead to a rejection."""
        return self.rejected_rollouts / max(1, self.rollouts)

    @property
    def group_share(self) -> float:
        """Of groups that are rejected whatever the node did before."""
        return self.rejected_groups / max(1, self.groups)


def judge_rollouts(group: Group, limits: LimitsSpec) -> list[Finding | None]:
    """What each rollout alone leads to."""
    return [judge([one.figures(limits)], limits=limits) for one in group]


def judge_alone(group: Group, limits: LimitsSpec) -> Finding | None:
    """What a group leads to, whatever its node did before: the first of its rows' findings, then all rows together."""
    alone = next((found for found in judge_rollouts(group, limits) if found is not None), None)
    return alone or judge_group(add(one.totals(limits) for one in group), limits=limits)


def try_groups(groups: Sequence[Group], limits: LimitsSpec) -> Caught:
    """One node's slots, in their order."""
    caught, drift = Caught(), Drift()
    for number, group in enumerate(groups, start=1):
        alone = judge_rollouts(group, limits)
        together = add(one.totals(limits) for one in group)
        finding = next((found for found in alone if found is not None), None) or judge_group(together, limits=limits)
        drift = follow(drift, together, limits=limits)
        drifted = judge_drift(drift, limits=limits)
        caught.rollouts += len(group)
        caught.rejected_rollouts += sum(found is not None for found in alone)
        caught.groups += 1
        caught.rejected_groups += finding is not None
        caught.drifted_groups += drifted is not None
        if drifted is not None:
            caught.first_drifted = caught.first_drifted or number
        worst = finding or drifted
        if worst is not None:
            caught.figures[worst.figure] += 1
            caught.first = caught.first or number
    return caught
