"""A proven key that holds what it is given."""

from __future__ import annotations

import zlib

from coordinator.lab.redteam.attack import SelectiveAttack
from coordinator.lab.redteam.workshop import Work

HONEST_OF = 3


class Squatter(SelectiveAttack):
    """Does a third of its slots, which keeps it proven, and holds the others: steps are to wait for them."""

    name = "squatter"
    about = f"does one slot of {HONEST_OF}, to stay proven, and holds the others until the lease ends"
    stands_for = "holding slots that a step is about to need, to slow the run"

    async def dislikes(self, work: Work) -> bool:
        return zlib.crc32(work.lease.lease_id.encode()) % HONEST_OF != 0
