"""Another node's lease."""

from __future__ import annotations

from coordinator.lab.redteam.attack import DoorAttack
from coordinator.lab.redteam.raid import Raid


class ForeignLease(DoorAttack):
    """Two keys, one of which has a lease: the other submits for it, and hands it back."""

    name = "foreign-lease"
    about = "submits and hands back under a lease that another node holds"
    stands_for = "submitting another's work as one's own"
    stopped_by = frozenset({"foreign_lease"})

    async def strike(self, raid: Raid) -> bool:
        taken = await raid.lease(self)
        if taken is None:
            return False
        holder, lease = taken
        thief = raid.fresh()
        if (await raid.door.register(thief)).accepted:
            answer, _ = await raid.door.submit(thief, lease, b"x" * 1000)
            raid.note(self, answer.code, node=thief.node, note="submit")
            raid.note(self, (await raid.door.give_back(thief, lease)).code, node=thief.node, note="return")
        await raid.door.give_back(holder, lease)
        return True
