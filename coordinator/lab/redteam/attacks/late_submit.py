"""Work for a lease that has ended."""

from __future__ import annotations

import asyncio
import time

from coordinator.lab.redteam.attack import DoorAttack, Forged, submission
from coordinator.lab.redteam.raid import Raid


class LateSubmit(DoorAttack):
    """Honest work, held back until somebody else has the slot."""

    name = "late-submit"
    about = "holds its work back until the lease has ended"
    stands_for = "hoarding leases with many free keys, to keep others from working"
    stopped_by = frozenset({"expired_lease", "stale_policy"})

    async def strike(self, raid: Raid) -> bool:
        """Takes as long as a lease."""
        taken = await raid.lease(self)
        if taken is None:
            return False
        identity, lease = taken
        try:
            forged = submission(await (await raid.workshop.work(lease)).honest())
        except FileNotFoundError:
            forged = Forged(b"x" * 1000)
        await asyncio.sleep(max(0.0, lease.expires_at - time.time()) + 1.0)
        await raid.submit(self, identity, lease, forged)
        raid.discard(self)
        return True
