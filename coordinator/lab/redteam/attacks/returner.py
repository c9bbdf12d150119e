"""A proven key that takes slots and returns them."""

from __future__ import annotations

from coordinator.lab.processes.journal import HANDED_BACK
from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.raid import Raid
from coordinator.lab.redteam.workshop import Work

RETURNS = 12


class Returner(SlotAttack):
    """Does a slot honestly, then takes and returns slots until it is made to wait."""

    name = "returner"
    about = f"does a slot to be proven, then takes up to {RETURNS} and returns each at once, again and again"
    stands_for = "returning slots and taking them again, to hold a step up"
    stopped_by = frozenset({"done_by_others", "left_over"})
    picks_slots = True

    async def strike(self, raid: Raid) -> bool:
        worked = await super().strike(raid)
        for _ in range(RETURNS if worked else 0):
            taken = await raid.lease(self)
            if taken is None:
                break
            identity, lease = taken
            await raid.door.give_back(identity, lease)
            raid.note(self, HANDED_BACK, node=identity.node, slot=f"{lease.version}/{lease.slot}")
        return worked

    async def forge(self, work: Work) -> Forged | None:
        return submission(await work.honest(), hostile=False)
