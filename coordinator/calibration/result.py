"""Result of a calibration: the content of calibration.json and of the table."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from coordinator.calibration.fit import Group, single_value_limits
from coordinator.calibration.recording import MachineInfo
from coordinator.calibration.trial import TrialCounts, try_groups
from node.protocol.admission import Finding
from node.protocol.evidence import add, evidences
from node.protocol.run import LimitsSpec, RunSpec

SCHEMA = "swarmproof-calibration/1"


@dataclass(frozen=True, slots=True)
class CheatOutcome:
    """One worker's groups, honest or not, judged by the fitted limits.

    `second_looks` are findings in groups that would otherwise pass (`node.verification.second_look`).
    `rollout_evidence` and `group_evidence` are the largest evidence of one rollout and one group, in nats.
    """

    name: str
    caught: TrialCounts
    second_looks: Sequence[Finding]
    tokens: int
    rollout_evidence: float
    group_evidence: float

    @property
    def rejected_groups(self) -> int:
        """Groups rejected regardless of the node's history, second looks included."""
        return self.caught.rejected_groups + len(self.second_looks)

    @property
    def would_be_stopped(self) -> bool:
        """Whether a group is rejected, or the node for its drift."""
        return bool(self.rejected_groups or self.caught.drifted_groups)

    @property
    def by(self) -> Counter[str]:
        """Count groups by the figure that first exceeded its limit."""
        return self.caught.figures + Counter(finding.figure for finding in self.second_looks)

    def figures(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        caught = self.caught
        return {
            "name": self.name,
            "groups": caught.groups,
            "rollouts": caught.rollouts,
            "tokens": self.tokens,
            "rejected_groups": self.rejected_groups,
            "rejected_at_second_look": len(self.second_looks),
            "rejected_rollouts": caught.rejected_rollouts,
            "rollout_evidence_max": self.rollout_evidence,
            "group_evidence_max": self.group_evidence,
            "drifted_groups": caught.drifted_groups,
            "slots_until_drift": caught.first_drifted,
            "by": dict(self.by.most_common()),
        }


def outcome(name: str, groups: Sequence[Group], limits: LimitsSpec, *, second_looks: Sequence[Finding]) -> CheatOutcome:
    """Judge a worker's groups, in the order it sent them."""
    rollout_totals = [one.totals(limits) for group in groups for one in group]
    group_totals = [add(one.totals(limits) for one in group) for group in groups]

    def max_evidence(totals: Any) -> float:
        return max(nats for each in totals for _, nats in evidences(each, limits=limits))

    return CheatOutcome(
        name=name,
        caught=try_groups(groups, limits),
        second_looks=second_looks,
        tokens=sum(len(one.margins) for group in groups for one in group),
        rollout_evidence=max_evidence(rollout_totals),
        group_evidence=max_evidence(group_totals),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOutcome:
    """One worker of another machine's recording, `judged` by limits that are fitted without it.

    `widened` is the limit of single values that it would widen most, `ratio` by how much; `accepted` says whether the
    operator named it, `fitted` whether the run's limits are fitted to it.
    """

    node: str
    machine: MachineInfo
    judged: CheatOutcome
    widened: str
    ratio: float
    accepted: bool = False
    fitted: bool = False

    def figures(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            **self.judged.figures(),
            "node": self.node,
            "machine": msgspec.to_builtins(self.machine),
            "widened": self.widened,
            "ratio": self.ratio,
            "accepted": self.accepted,
            "fitted": self.fitted,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """A finished calibration: `spec` is the run with its new limits, `policy` the digest of the policy's file.

    `verifier` is the engine that measured. Each honest worker drew `groups`; it should have drawn `least_groups`.
    `largest` holds the largest honest values behind single-value limits. `honest` are outcomes of groups that no level
    was fitted to; `measured` has every group behind `honest` and `cheats`, by name. `recorded` are the recordings of
    other machines, whose groups count in `largest` where limits were fitted to them.
    """

    spec: RunSpec
    swarmproof: str
    policy: str
    verifier: str
    groups: int
    least_groups: int
    largest: Mapping[str, float]
    honest: Sequence[CheatOutcome]
    recorded: Sequence[RecordedOutcome]
    cheats: Sequence[CheatOutcome]
    measured: Mapping[str, Sequence[Group]]

    @property
    def remarks(self) -> list[str]:
        """Comment lines on the levels' origin; without a date, so that equal results give equal files."""
        workers = " and ".join(one.name for one in self.honest)
        others = [
            f"{one.judged.caught.groups} by {one.node[:16]} ({one.judged.name}, {one.machine.device})"
            for one in self.recorded
            if one.fitted
        ]
        drawn = f"{self.groups} groups of {self.spec.sampling.group_size} of each honest worker ({workers})"
        return textwrap.wrap(
            f"CalibrationResult by `swarmproof calibrate` {self.swarmproof} from {' and of '.join([drawn, *others])}, "
            f"every other one fitted, measured with {self.verifier} under the policy {self.policy}. Find them anew "
            "when the model, its dtype, the proofs or the engines change.",
            width=110,
        )

    @property
    def warnings(self) -> list[str]:
        """Warnings for the operator."""
        defaults, limits = LimitsSpec(), self.spec.limits
        warnings = [
            f"{name} = {getattr(limits, name):g} is wider than the default {getattr(defaults, name):g}: honest work "
            f"reached {self.largest[name]:.3g} here."
            for name in single_value_limits(self.spec.proofs)
            if getattr(limits, name) > getattr(defaults, name)
        ]
        fitted = [*self.honest, *(one.judged for one in self.recorded if one.fitted)]
        if self.groups < self.least_groups:
            warnings.append(
                f"Of {self.groups} groups of each worker, half of which levels were fitted to, too little is seen of "
                f"how far honest groups are apart: a run may reject some. Take {self.least_groups} or more (--groups)."
            )
        if self.verifier != "torch" and not any(one.name.startswith("torch") for one in fitted):
            warnings.append(
                "No level was fitted to torch's kernels: honest workers with torch would be rejected, audits with it "
                "would disagree, and cheats, which torch draws, are caught for it as well. Add --engine torch."
            )
        for one in self.honest:
            if one.rejected_groups:
                warnings.append(
                    f"{one.rejected_groups} of {one.caught.groups} honest groups of {one.name} would be "
                    "rejected: calibrate with more --groups."
                )
            if one.caught.drifted_groups:
                warnings.append(
                    f"An honest worker ({one.name}) would be stopped for its drift: calibrate with more --groups."
                )
        left_out = {one.node: one.machine.device for one in self.recorded if not one.fitted}
        warnings += [
            f"The recording of {node[:16]} ({device}) is left out: limits that are fitted without it would reject such "
            "work, or be less than half as wide. If you know the machine, name the file with --accept."
            for node, device in left_out.items()
        ]
        return warnings

    def render_json(self, *, out: str) -> str:
        """Render one line of JSON; `out` is the written run.toml."""
        spec = self.spec
        return json.dumps(
            {
                "schema": SCHEMA,
                "swarmproof": self.swarmproof,
                "out": out,
                "policy": self.policy,
                "verifier": self.verifier,
                "dtype": spec.model.dtype,
                "group_size": spec.sampling.group_size,
                "groups": self.groups,
                "proofs": msgspec.to_builtins(spec.proofs),
                "limits": msgspec.to_builtins(spec.limits),
                "largest": dict(self.largest),
                "honest": [one.figures() for one in self.honest],
                "recorded": [one.figures() for one in self.recorded],
                "cheats": [one.figures() for one in self.cheats],
                "warnings": self.warnings,
            }
        )
