"""Who had slots and did not deliver them, and how likely it is that this is chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.dashboard.visible import visible
from coordinator.storage.database import Connection
from coordinator.storage.deliveries import NodeDeliveries, read_withheld
from node.protocol.run import RunSpec
from node.protocol.withholding import EVEN, Unevenness

SHOWN: Final = 8
SIGNAL: Final = {True: "groups with signal", False: "groups without signal"}


@dataclass(frozen=True, slots=True)
class WithholdingRow:
    """One node's slots: what it withheld above all, with the odds of that by chance; "" if chance explains it."""

    node: str
    delivered: int
    missed: int
    kind: str
    odds: str


def read_rows(connection: Connection, *, spec: RunSpec) -> Sequence[WithholdingRow]:
    """Return the nodes that withheld slots, the least likely to be chance first, at most SHOWN."""
    found = [(_least_even(one, spec=spec), node, one) for node, one in read_withheld(connection).items()]
    found.sort(key=lambda row: (row[0][1].probability, -row[2].by_environment.missed.total()))
    return [
        WithholdingRow(
            node=node,
            delivered=one.by_environment.delivered.total(),
            missed=one.by_environment.missed.total(),
            kind=kind if unevenness.probability < EVEN else "",
            odds=unevenness.odds if unevenness.probability < EVEN else "",
        )
        for (kind, unevenness), node, one in found[:SHOWN]
    ]


def _least_even(of_node: NodeDeliveries, *, spec: RunSpec) -> tuple[str, Unevenness]:
    environment, signal = of_node.by_environment.unevenness(), of_node.by_signal.unevenness()
    if signal.kind is not None and signal.probability < environment.probability:
        return SIGNAL[bool(signal.kind)], signal
    return "" if environment.kind is None else visible(spec.environments[environment.kind].name, most=40), environment
