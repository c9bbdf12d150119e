"""Judge groups of rollouts by a run's limits, as a verifier and the log would, and count the rejections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.calibration.fit import Group
from node.protocol.admission import Finding, judge_drift, judge_group, judge_rows
from node.protocol.evidence import Drift, add, follow
from node.protocol.run import LimitsSpec


@dataclass(slots=True)
class TrialCounts:
    """Counts over one worker's slots: rollouts and groups rejected on their own, and for which figure.

    `first` is the slot (from 1) of the node's first rejection, drift included; `first_drifted` that of its first
    rejection for drift; None if there was none.
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
        """Share of rollouts rejected on their own."""
        return self.rejected_rollouts / max(1, self.rollouts)

    @property
    def group_share(self) -> float:
        """Share of groups rejected regardless of the node's history."""
        return self.rejected_groups / max(1, self.groups)


def judge_rollouts(group: Group, limits: LimitsSpec) -> list[Finding | None]:
    """Judge each rollout on its own."""
    return [judge_rows({0: one.figures(limits)}, limits=limits) for one in group]


def judge_group_alone(group: Group, limits: LimitsSpec) -> Finding | None:
    """Judge a group regardless of its node's history: first its rollouts, then their sum."""
    alone = next((found for found in judge_rollouts(group, limits) if found is not None), None)
    return alone or judge_group(add(one.totals(limits) for one in group), limits=limits)


def try_groups(groups: Sequence[Group], limits: LimitsSpec) -> TrialCounts:
    """Judge one node's slots in order."""
    counts, drift = TrialCounts(), Drift()
    for number, group in enumerate(groups, start=1):
        alone = judge_rollouts(group, limits)
        together = add(one.totals(limits) for one in group)
        finding = next((found for found in alone if found is not None), None) or judge_group(together, limits=limits)
        drift = follow(drift, together, limits=limits)
        drifted = judge_drift(drift, limits=limits)
        counts.rollouts += len(group)
        counts.rejected_rollouts += sum(found is not None for found in alone)
        counts.groups += 1
        counts.rejected_groups += finding is not None
        counts.drifted_groups += drifted is not None
        if drifted is not None:
            counts.first_drifted = counts.first_drifted or number
        worst = finding or drifted
        if worst is not None:
            counts.figures[worst.figure] += 1
            counts.first = counts.first or number
    return counts
