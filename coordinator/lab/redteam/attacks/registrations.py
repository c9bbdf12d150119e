"""Thousands of new identities."""

from __future__ import annotations

import asyncio
from collections import Counter

from coordinator.lab.processes.journal import ACCEPTED
from coordinator.lab.redteam.attack import DoorAttack
from coordinator.lab.redteam.http_client import CLOSED, Identity
from coordinator.lab.redteam.raid import Raid

AT_ONCE = 16
LET_IN = "let_in"
MOST_IN_A_BURST = 300
"""Of one address: what a minute's allowance leaves room for, with another minute's that passes meanwhile."""


class Registrations(DoorAttack):
    """As many keys as there is time for, from one address."""

    name = "registrations"
    about = "registers keys by the thousand, from one address"
    stands_for = "many requests, large or slow bodies"
    stopped_by = frozenset({"too_many_requests", LET_IN, CLOSED})

    def __init__(self, burst: int = 1500) -> None:
        self._burst = burst

    async def strike(self, raid: Raid) -> bool:
        codes: Counter[str] = Counter()
        left = iter(range(self._burst))
        async with raid.elsewhere() as door:

            async def register() -> None:
                for _ in left:
                    codes[(await door.register(Identity())).code] += 1

            await asyncio.gather(*(register() for _ in range(AT_ONCE)))
        let_in = codes.pop(ACCEPTED, 0)
        too_many = max(0, let_in - MOST_IN_A_BURST)
        codes.update({LET_IN: let_in - too_many, ACCEPTED: too_many})
        for code, count in codes.items():
            if count:
                raid.note(self, code, node="", count=count)
        return True
