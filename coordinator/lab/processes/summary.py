"""What a finished demonstration was like, as values: the content of summary.json and of the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from coordinator.lab.processes.layout import Swarm
from coordinator.lab.processes.ledger import Ledger
from coordinator.lab.processes.resources import GIB
from coordinator.metrics.reward import END_STEPS, reward_figure
from node.protocol.admission import EVIDENCE, Figures, limit_of, worst
from node.protocol.run import RunSpec

SCHEMA = "swarmproof-demo/1"


class StepSummary(msgspec.Struct, frozen=True):
    """A training step. It waits until its batch is complete, trains, and publishes the next policy.

    `stats` are those of the trainer that are finite.
    """

    step: int
    reward_mean: float
    staleness_mean: float
    waiting_seconds: float
    training_seconds: float
    publishing_seconds: float
    stats: dict[str, float] = {}


class NodeSummary(msgspec.Struct, frozen=True):
    """A worker, by the public log. `tokens` are of admitted rollouts, `reasons` count rejections."""

    name: str
    kind: str
    node: str
    submitted: int
    admitted: int
    rejected: int
    indeterminate: int
    tokens: int
    reasons: dict[str, int]


class Headroom(msgspec.Struct, frozen=True):
    """The largest value of a figure among honest admitted groups, and the run's limit for it."""

    figure: str
    honest_max: float
    limit: float


class BroadcastRow(msgspec.Struct, frozen=True):
    """Seconds from a policy's publication until each relay held all of it, as far as the watcher saw it."""

    version: int
    seconds: dict[str, float]


class FetchedRow(msgspec.Struct, frozen=True):
    """Bytes that a relay fetched, and what the policies that it had of them weigh: deltas make the difference."""

    relay: str
    fetched_bytes: int
    result_bytes: int


class AuditRow(msgspec.Struct, frozen=True):
    """What `swarmproof audit` said: its exit code (0 agrees, 1 disagrees, 2 could not run) and its JSON."""

    command: str
    exit_code: int | None
    result: dict[str, Any] | None
    message: str = ""


class Summary(msgspec.Struct, frozen=True):
    """summary.json. Times are Unix seconds; `phases` and `cpu_seconds` are seconds by name."""

    schema: str
    run_id: str
    started_at: float
    seconds: float
    finished: bool
    figures: dict[str, float | int | None]
    steps: tuple[StepSummary, ...]
    nodes: tuple[NodeSummary, ...]
    phases: dict[str, float]
    cpu_seconds: dict[str, float]
    broadcasts: tuple[BroadcastRow, ...]
    fetched: tuple[FetchedRow, ...]
    headroom: tuple[Headroom, ...]
    restarts: dict[str, int]
    audit: AuditRow | None


class Observed(msgspec.Struct, frozen=True):
    """What the demonstration measured itself. `warm_start_at` is None if no warm start was seen."""

    started_at: float
    ended_at: float
    warm_start_at: float | None
    peak_bytes: int
    cpu_seconds: dict[str, float]
    restarts: dict[str, int]
    arrivals: dict[int, dict[str, float]]
    fetched: dict[str, tuple[int, int]]


def summarise(
    swarm: Swarm, status: Mapping[str, Any], ledger: Ledger, observed: Observed, *, audit: AuditRow | None
) -> Summary:
    """Summarise a run from the coordinator's last status, its log, and what was measured."""
    nodes = tuple(_node_rows(swarm, ledger))
    steps = tuple(_step_rows(status))
    return Summary(
        schema=SCHEMA,
        run_id=swarm.run_id,
        started_at=observed.started_at,
        seconds=observed.ended_at - observed.started_at,
        finished=bool(status.get("finished", False)),
        figures=_figures(steps, nodes, observed),
        steps=steps,
        nodes=nodes,
        phases=_phases(status, steps, observed),
        cpu_seconds=dict(sorted(observed.cpu_seconds.items())),
        broadcasts=tuple(_broadcasts(status, observed.arrivals)),
        fetched=tuple(FetchedRow(name, *counts) for name, counts in sorted(observed.fetched.items())),
        headroom=tuple(_headroom(swarm, ledger)),
        restarts=observed.restarts,
        audit=audit,
    )


def reward_gain(rewards: Sequence[float]) -> float | None:
    """Return the change of the reward over a run; None for too few steps to average over."""
    figure = reward_figure(rewards)
    return figure.change if figure is not None and figure.steps == END_STEPS else None


def bytes_saved(fetched: Iterable[tuple[int, int]]) -> float | None:
    """Return the share of the policies' bytes that deltas saved; None before any arrived."""
    counts = list(fetched)
    weight = sum(result for _, result in counts)
    return 1.0 - sum(got for got, _ in counts) / weight if weight else None


def _figures(
    steps: Sequence[StepSummary], nodes: Sequence[NodeSummary], observed: Observed
) -> dict[str, float | int | None]:
    hostile = [node for node in nodes if node.kind != "honest"]
    honest = [node for node in nodes if node.kind == "honest"]
    return {
        "reward_gain": reward_gain([step.reward_mean for step in steps]),
        "hostile_slots_submitted": sum(node.submitted for node in hostile),
        "hostile_slots_admitted": sum(node.admitted for node in hostile),
        "honest_slots_admitted": sum(node.admitted for node in honest),
        "honest_slots_rejected": sum(node.rejected for node in honest),
        "broadcast_bytes_saved": bytes_saved(observed.fetched.values()),
        "seconds": observed.ended_at - observed.started_at,
        "peak_memory_gib": observed.peak_bytes / GIB,
    }


def _step_rows(status: Mapping[str, Any]) -> list[StepSummary]:
    """Return the finished steps. The first one waits from the first policy's publication on.

    What of a publication the next step was trained beside is that step's time.
    """
    policies = status.get("policies", [])
    before = policies[0]["published_at"] if policies else 0.0
    rows = []
    steps = status.get("steps", [])
    for step, following in zip_longest(steps, steps[1:]):
        if step["finished_at"] is None:
            break
        published = step["finished_at"] if following is None else min(step["finished_at"], following["assigned_at"])
        trained = step["stats"].get("train_seconds", 0.0)
        rows.append(
            StepSummary(
                step=step["step"],
                reward_mean=step["reward_mean"],
                staleness_mean=step["staleness_mean"],
                waiting_seconds=max(0.0, step["assigned_at"] - before),
                training_seconds=trained,
                publishing_seconds=max(0.0, published - step["assigned_at"] - trained),
                stats={name: value for name, value in step["stats"].items() if math.isfinite(value)},
            )
        )
        before = step["finished_at"]
    return rows


def _phases(status: Mapping[str, Any], steps: Sequence[StepSummary], observed: Observed) -> dict[str, float]:
    """Return wall-clock seconds by phase; their sum is the whole time."""
    policies = status.get("policies", [])
    first = policies[0]["published_at"] if policies else observed.ended_at
    warm = first if observed.warm_start_at is None else min(first, observed.warm_start_at)
    phases = {
        "starting the processes": warm - observed.started_at,
        "warm start": first - warm,
        "waiting for admitted groups": sum(step.waiting_seconds for step in steps),
        "training": sum(step.training_seconds for step in steps),
        "publishing": sum(step.publishing_seconds for step in steps),
    }
    phases["audit and end"] = max(0.0, observed.ended_at - observed.started_at - sum(phases.values()))
    return phases


def _node_rows(swarm: Swarm, ledger: Ledger) -> list[NodeSummary]:
    rows = []
    for place in swarm.workers:
        record = ledger.record(*place.nodes)
        rows.append(
            NodeSummary(
                name=place.name,
                kind=place.kind,
                node=place.node,
                submitted=record.submitted,
                admitted=record.admitted,
                rejected=record.rejected,
                indeterminate=record.indeterminate,
                tokens=record.tokens,
                reasons=dict(record.reasons.most_common()),
            )
        )
    return rows


def _broadcasts(status: Mapping[str, Any], arrivals: Mapping[int, Mapping[str, float]]) -> list[BroadcastRow]:
    published = {policy["version"]: policy["published_at"] for policy in status.get("policies", [])}
    return [
        BroadcastRow(
            version=version,
            seconds={name: max(0.0, at - published[version]) for name, at in sorted(arrived.items())},
        )
        for version, arrived in sorted(arrivals.items())
        if version in published
    ]


def _headroom(swarm: Swarm, ledger: Ledger) -> list[Headroom]:
    records = [ledger.record(*place.nodes).worst for place in swarm.workers if place.honest]
    measured = [figures for figures in records if figures is not None]
    if not measured:
        return []
    largest: Figures = worst(measured)
    return [
        Headroom(figure=figure, honest_max=getattr(largest, figure), limit=limit_of(figure, swarm.spec.limits)[1])
        for figure in Figures.__struct_fields__
        if _is_measured(figure, swarm.spec)
    ]


def _is_measured(figure: str, spec: RunSpec) -> bool:
    """Return whether the run's proofs have this figure, and its limits the level it depends on."""
    if figure.endswith(EVIDENCE) and getattr(spec.limits.honest, figure.removesuffix(EVIDENCE)) is None:
        return False
    if figure.startswith(("sketch", "far")):
        return spec.proofs.has_sketch
    return spec.proofs.has_toploc or not figure.startswith(("exponent", "mantissa"))
