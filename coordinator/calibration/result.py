"""What a calibration found, as values: the content of calibration.json, and of the table."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from coordinator.calibration.fit import Group, judged_alone
from coordinator.calibration.trial import Caught, try_groups
from node.protocol.admission import Finding
from node.protocol.evidence import add, evidences
from node.protocol.run import LimitsSpec, RunSpec

SCHEMA = "veriswarm-calibration/1"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Groups of one worker, honest or not, under the limits that were found.

    `seen_again` are what a second look finds in groups that would pass (`node.second_look`). `rollout_evidence` and
    `group_evidence` are the most, in nats, that one rollout and one group show.
    """

    name: str
    caught: Caught
    seen_again: Sequence[Finding]
    tokens: int
    rollout_evidence: float
    group_evidence: float

    @property
    def rejected_groups(self) -> int:
        """Those that are rejected whatever the node did before, second looks included."""
        return self.caught.rejected_groups + len(self.seen_again)

    @property
    def by(self) -> Counter[str]:
        """The figures that were over their limits first, a group each."""
        return self.caught.figures + Counter(finding.figure for finding in self.seen_again)

    def figures(self) -> dict[str, Any]:
        """For programs."""
        caught = self.caught
        return {
            "name": self.name,
            "groups": caught.groups,
            "rollouts": caught.rollouts,
            "tokens": self.tokens,
            "rejected_groups": self.rejected_groups,
            "rejected_at_second_look": len(self.seen_again),
            "rejected_rollouts": caught.rejected_rollouts,
            "rollout_evidence_max": self.rollout_evidence,
            "group_evidence_max": self.group_evidence,
            "drifted_groups": caught.drifted_groups,
            "slots_until_drift": caught.first_drifted,
            "by": dict(self.by.most_common()),
        }


def outcome(name: str, groups: Sequence[Group], limits: LimitsSpec, *, seen_again: Sequence[Finding]) -> Outcome:
    """What the limits say of a worker's groups, in the order in which it sent them."""
    alone = [one.totals(limits) for group in groups for one in group]
    together = [add(one.totals(limits) for one in group) for group in groups]

    def most(totals: Any) -> float:
        return max(nats for each in totals for _, nats in evidences(each, limits=limits))

    return Outcome(
        name=name,
        caught=try_groups(groups, limits),
        seen_again=seen_again,
        tokens=sum(len(one.margins) for group in groups for one in group),
        rollout_evidence=most(alone),
        group_evidence=most(together),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A finished calibration: `spec` is the run with its new limits, `policy` the digest of the policy's file.

    `largest` are the largest honest values of what is judged alone. `honest` are outcomes of groups that no level
    was fitted to; `measured` is every group behind `honest` and `cheats`, by their names.
    """

    spec: RunSpec
    veriswarm: str
    policy: str
    groups: int
    largest: Mapping[str, float]
    honest: Sequence[Outcome]
    cheats: Sequence[Outcome]
    measured: Mapping[str, Sequence[Group]]

    @property
    def remarks(self) -> list[str]:
        """Where the levels come from, for the file; without a date, so that the same findings make the same file."""
        workers = " and ".join(one.name for one in self.honest)
        return textwrap.wrap(
            f"Found by `veriswarm calibrate` {self.veriswarm} from {self.groups} groups of "
            f"{self.spec.sampling.group_size} of each honest worker ({workers}), every other one fitted, under the "
            f"policy {self.policy}. Find them anew when the model, its dtype, the proofs or the engines change.",
            width=110,
        )

    @property
    def warnings(self) -> list[str]:
        """What an operator should know before using the limits."""
        defaults, limits = LimitsSpec(), self.spec.limits
        said = [
            f"{name} = {getattr(limits, name):g} is wider than the default {getattr(defaults, name):g}: honest work "
            f"reached {self.largest[name]:.3g} here."
            for name in judged_alone(self.spec.proofs)
            if getattr(limits, name) > getattr(defaults, name)
        ]
        for one in self.honest:
            if one.rejected_groups:
                said.append(
                    f"{one.rejected_groups} of {one.caught.groups} honest groups of {one.name} would be "
                    "rejected: calibrate with more --groups."
                )
            if one.caught.drifted_groups:
                said.append(f"An honest worker ({one.name}) would be stopped for its drift: take more --groups.")
        return said

    def render_json(self, *, out: str) -> str:
        """One line; `out` is the run.toml that was written."""
        spec = self.spec
        return json.dumps(
            {
                "schema": SCHEMA,
                "veriswarm": self.veriswarm,
                "out": out,
                "policy": self.policy,
                "dtype": spec.model.dtype,
                "group_size": spec.sampling.group_size,
                "groups": self.groups,
                "proofs": msgspec.to_builtins(spec.proofs),
                "limits": msgspec.to_builtins(spec.limits),
                "largest": dict(self.largest),
                "honest": [one.figures() for one in self.honest],
                "cheats": [one.figures() for one in self.cheats],
                "warnings": self.warnings,
            }
        )
