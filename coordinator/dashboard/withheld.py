"""Who had slots and did not deliver them, and how likely it is that this is chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.dashboard.visible import visible
from coordinator.storage.database import Connection
from coordinator.storage.deliveries import read_withheld
from node.protocol.run import RunSpec
from node.protocol.withholding import EVEN, Unevenness, corrected

SHOWN: Final = 8
SIGNAL: Final = {True: "groups with signal", False: "groups without signal"}


@dataclass(frozen=True, slots=True)
class WithholdingRow:
    """One node's slots: what it withheld above all, with the odds of that by chance; "" if chance explains it.

    The odds are of any of the nodes here being as uneven.
    """

    node: str
    delivered: int
    missed: int
    kind: str
    odds: str


def read_rows(connection: Connection, *, spec: RunSpec) -> Sequence[WithholdingRow]:
    """Return the nodes that withheld slots, the least likely to be chance first, at most SHOWN."""
    of_nodes = read_withheld(connection)
    by_environment = {(node, "environment"): one.by_environment.unevenness() for node, one in of_nodes.items()}
    by_signal = {(node, "signal"): one.by_signal.unevenness() for node, one in of_nodes.items()}
    compared = corrected(by_environment | by_signal)
    found = [
        (_least_even(compared[node, "environment"], compared[node, "signal"], spec=spec), node, one)
        for node, one in of_nodes.items()
    ]
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


def _least_even(environment: Unevenness, signal: Unevenness, *, spec: RunSpec) -> tuple[str, Unevenness]:
    if signal.kind is not None and signal.probability < environment.probability:
        return SIGNAL[bool(signal.kind)], signal
    return "" if environment.kind is None else visible(spec.environments[environment.kind].name, most=40), environment
