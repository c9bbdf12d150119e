"""Plan the verification of one submission: run the checks that need no model, choose the rows to measure.

Pure, and free of any model: rollouts and draws in, a `Plan` or a Refusal out (docs/protocol.md, sections 6.3 and 7.6).
The environment is asked for its replies and nothing else is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from node.environments import Environment, check_rewards
from node.episodes.conversation import in_time
from node.episodes.expected import expected_of
from node.policy.file import Blueprint
from node.protocol.evidence import Totals, evidences
from node.protocol.run import LimitsSpec, RunSpec
from node.protocol.submission import Rollout, check_rollouts
from node.protocol.turns import Replies
from node.verification.proofs import check_proof_form

Probe = Callable[[int], int | None]
"""From a claim's number of rows to the one that is measured and judged before the others; None: all together."""

Look = Callable[[Totals, LimitsSpec], bool]
"""Decides whether a group with these totals, otherwise admitted, gets a second look (section 7.4)."""


def measure_all(rows: int) -> None:
    """Probe of an auditor: measure every row."""


def look_if_suspicious(draw: float) -> Look:
    """Return the run's own rule: look where the sketch deviates more than most honest groups' do, else by chance.

    `draw` is uniform in [0, 1) and unforeseeable for the sender.
    """

    def look(totals: Totals, limits: LimitsSpec) -> bool:
        return dict(evidences(totals, limits=limits))["sketch"] > limits.suspicion or draw < limits.second_looks

    return look


def always(_totals: Totals, _limits: LimitsSpec) -> bool:
    """Look of an auditor for a verdict with a second look's finding."""
    return True


def never(_totals: Totals, _limits: LimitsSpec) -> bool:
    """Look of an auditor for any other verdict."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A parsed submission with its lease: `slot` of the leased policy `version`.

    `full` is False where the standing of the node (`node.protocol.standing`) lets one row stand for all.
    """

    version: int
    manifest_digest: str
    slot: int
    rollouts: Sequence[Rollout]
    full: bool = True
    candidate: int = 0

    @property
    def tokens(self) -> int:
        """Completion tokens of the group."""
        return sum(len(rollout.completion_ids) for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a run; `environments` are its own, in its order.

    Without `need_answers` (an auditor), rewards whose answers are not here are left out. Raises EnvironmentFault,
    SandboxFailed or DatasetFault where this machine cannot compute the others.
    """

    run_id: str
    spec: RunSpec
    environments: Sequence[Environment]
    need_answers: bool = True

    def __post_init__(self) -> None:
        check_rewards(self.environments, need_answers=self.need_answers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A claim that passed every check without a model, and the rows to measure.

    `stages` are the rows to measure, one stage after the other as long as nothing is found. `replies` are what the
    environment said in each row.
    """

    claim: Claim
    rules: Rules
    blueprint: Blueprint
    replies: Sequence[Replies]
    stages: Sequence[Sequence[int]]
    look: Look

    @property
    def spot(self) -> int | None:
        """The only row measured; None where all are."""
        rows = [row for stage in self.stages for row in stage]
        return None if len(rows) == len(self.claim.rollouts) else rows[0]


def plan_claim(
    claim: Claim, blueprint: Blueprint, *, rules: Rules, published: Collection[int], probe: Probe, look: Look
) -> Plan:
    """Run the checks of section 6.3 in their order and plan the measurements.

    Args: `blueprint` is the leased policy's. `published` are the versions that the run has published so far.
    Raises the first Refusal, and what the environment raises.
    """
    expected = expected_of(
        rules.spec,
        blueprint,
        rules.environments,
        run_id=rules.run_id,
        version=claim.version,
        manifest_digest=claim.manifest_digest,
        slot=claim.slot,
        candidate=claim.candidate,
        published=published,
    )
    if expected.ask is not None:
        expected = replace(expected, ask=in_time(expected.ask))
    replies = check_rollouts(claim.rollouts, expected=expected, spec=rules.spec)
    check_proof_form(claim.rollouts, replies, hidden=blueprint.hidden, spec=rules.spec.proofs)
    stages = _stages(len(claim.rollouts), probe, full=claim.full)
    return Plan(claim=claim, rules=rules, blueprint=blueprint, replies=replies, stages=stages, look=look)


def _stages(rows: int, probe: Probe, *, full: bool) -> list[list[int]]:
    """Return the probed row first, so that garbage costs one row; then the others, if measured in full."""
    first = probe(rows)
    if first is None:
        return [list(range(rows))]
    others = [row for row in range(rows) if row != first]
    return [[first], others] if full and others else [[first]]
