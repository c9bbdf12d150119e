"""What each node delivered of the slots that it had, and what it did not, by kind (docs/protocol.md, section 7.7).

Counted in the transaction of the batch that settles the slots, from what its log entry says.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import Connection, bindparam, func, select

from coordinator.storage.counters import adding_to
from coordinator.storage.facts import read_run_id
from coordinator.storage.schema import UNKNOWN_SIGNAL, deliveries, groups, policies, slots, submissions
from node.protocol.messages import MissedSlot
from node.protocol.run import RunSpec
from node.protocol.slots import slot_problem
from node.protocol.withholding import Deliveries

MOST_NODES: Final = 200
_ADD: Final = adding_to(deliveries)
_USED: Final = (
    select(slots.c.version, slots.c.number, groups.c.signal, submissions.c.node)
    .join(groups, groups.c.slot_id == slots.c.id)
    .join(submissions, submissions.c.submission == groups.c.submission)
    .where(groups.c.step == bindparam("step"))
)
_MANIFESTS: Final = select(policies.c.version, policies.c.manifest_digest).where(
    policies.c.version.in_(bindparam("versions", expanding=True))
)
_missed_of_node = func.sum(deliveries.c.missed)
_MOST_MISSED: Final = (
    select(deliveries.c.node)
    .where(deliveries.c.missed > 0)
    .group_by(deliveries.c.node)
    .order_by(_missed_of_node.desc())
    .limit(MOST_NODES)
)
_OF_NODES: Final = select(deliveries).where(deliveries.c.node.in_(bindparam("nodes", expanding=True)))


@dataclass(slots=True)
class NodeDeliveries:
    """One node's slots, by environment and by whether the group had signal."""

    by_environment: Deliveries = field(default_factory=Deliveries)
    by_signal: Deliveries = field(default_factory=Deliveries)


def count_step(connection: Connection, step: int, missed: Sequence[MissedSlot], *, spec: RunSpec) -> None:
    """Count the slots of a step that has its groups, and those that nodes `missed`."""
    used = connection.execute(_USED, {"step": step}).all()
    versions = sorted({row.version for row in used} | {miss.version for miss in missed})
    known = connection.execute(_MANIFESTS, {"versions": versions})
    manifests = {row.version: row.manifest_digest for row in known}
    run_id = read_run_id(connection)
    signals = {(row.version, row.number): int(row.signal) for row in used}
    counts: dict[tuple[str, int, int], Counter[str]] = defaultdict(Counter)

    def count(node: str, version: int, number: int, what: str) -> None:
        where = {"run_id": run_id, "manifest_digest": manifests[version], "slot": number}
        environment = slot_problem(spec, **where).environment
        counts[node, environment, signals.get((version, number), UNKNOWN_SIGNAL)][what] += 1

    for row in used:
        count(row.node, row.version, row.number, "delivered")
    for miss in missed:
        count(miss.node, miss.version, miss.slot, "missed")
    rows = [
        {"node": node, "environment": environment, "signal": signal, "delivered": n["delivered"], "missed": n["missed"]}
        for (node, environment, signal), n in sorted(counts.items())
    ]
    if rows:
        connection.execute(_ADD[connection.dialect.name], rows)


def read_withheld(connection: Connection) -> dict[str, NodeDeliveries]:
    """Return the deliveries of the nodes that missed most slots, at most MOST_NODES."""
    found: dict[str, NodeDeliveries] = defaultdict(NodeDeliveries)
    names = list(connection.execute(_MOST_MISSED).scalars())
    for row in connection.execute(_OF_NODES, {"nodes": names}):
        of_node = found[row.node]
        of_node.by_environment.delivered[row.environment] += row.delivered
        of_node.by_environment.missed[row.environment] += row.missed
        if row.signal != UNKNOWN_SIGNAL:
            of_node.by_signal.delivered[bool(row.signal)] += row.delivered
            of_node.by_signal.missed[bool(row.signal)] += row.missed
    return dict(found)
