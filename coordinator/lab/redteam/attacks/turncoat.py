"""Good work first, to have credit."""

from __future__ import annotations

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission, unless_forced
from coordinator.lab.redteam.attacks.one_row import one_row_better
from coordinator.lab.redteam.raid import Raid
from coordinator.lab.redteam.workshop import Work

MOST_PATIENCE = 3
"""Probations that a key works through before it cheats, at most."""


class Turncoat(SlotAttack):
    """Passes its probation, and cheats in one row of each group afterwards, until it is thrown out.

    Each key works well for longer than the last, up to a point, when less of its work may be measured.
    """

    name = "turncoat"
    about = "works honestly through its probation, then cheats in one row of each group"
    stands_for = "cheating a little in every slot; good work first, to have credit"
    stopped_by = frozenset({"wrong_token", "proof_mismatch"})

    def __init__(self) -> None:
        self._done = 0
        self._keys: list[str] = []

    async def strike(self, raid: Raid) -> bool:
        identity = await raid.identity(self)
        if identity.node not in self._keys[-1:]:
            self._keys.append(identity.node)
        self._done = identity.uses
        return await super().strike(raid)

    async def forge(self, work: Work) -> Forged:
        """Honest as long as this key is new."""
        patience = 1 + (len(self._keys) - 1) % MOST_PATIENCE
        if self._done < patience * work.spec.standing.probation:
            return submission(await work.honest(), hostile=False)
        return await unless_forced(work, await one_row_better(work))
