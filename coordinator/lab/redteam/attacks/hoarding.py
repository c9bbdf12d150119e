"""Leases that nobody means to work on."""

from __future__ import annotations

from coordinator.lab.processes.journal import ACCEPTED
from coordinator.lab.redteam.attack import DoorAttack
from coordinator.lab.redteam.http_client import Identity
from coordinator.lab.redteam.raid import Raid

KEYS = 6
ALL = 1024
ONE, NONE = "one_lease", "no_lease"


class Hoarding(DoorAttack):
    """New keys, each of which asks for all the work there is, and lets it lapse."""

    name = "hoarding"
    about = f"has {KEYS} new keys ask for {ALL} slots each, and does none of them"
    stands_for = "hoarding leases with many free keys, to keep others from working"
    stopped_by = frozenset({ONE, NONE})

    async def strike(self, raid: Raid) -> bool:
        """More than one slot for a new key would be too many."""
        held = raid.feed.versions()
        if not held:
            return False
        for _ in range(KEYS):
            identity = Identity()
            answer = await raid.door.register(identity)
            if not answer.accepted:
                raid.note(self, answer.code, node=identity.node, note="register")
                continue
            answer, leases = await raid.door.lease(identity, held=held, slots=ALL)
            code = ACCEPTED if len(leases) > 1 else ONE if leases else NONE if answer.accepted else answer.code
            raid.note(self, code, node=identity.node, note=f"{len(leases)} leases")
        return True
