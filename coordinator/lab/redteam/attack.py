"""What all attacks have in common. Each is one small class in `coordinator.lab.redteam.attacks`.

A `SlotAttack` takes a slot like anybody and sends something else than honest work for it. A `DoorAttack` sends requests
that an honest node never sends. Both run within a `coordinator.lab.redteam.raid.Raid`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from coordinator.lab.processes.journal import HANDED_BACK, HELD
from coordinator.lab.redteam.workshop import Work
from node.protocol.submission import Rollout
from node.submission.writer import write_rollouts

if TYPE_CHECKING:
    from coordinator.lab.redteam.raid import Raid


@dataclass(frozen=True, slots=True)
class Forged:
    """What is sent for a slot. `hostile` is whether any of it is not what an honest worker would send."""

    body: bytes
    hostile: bool = True
    note: str = ""


class Attack(ABC):
    """One way to cheat.

    `stands_for` is the line of the threat model that it tries, `stopped_by` the codes that it is expected to meet:
    others are shown, too, but raise the question why.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    stands_for: ClassVar[str]
    stopped_by: ClassVar[frozenset[str]]

    @abstractmethod
    async def strike(self, raid: Raid) -> bool:
        """Try once; False where there was nothing to do it with. What happened goes into the raid's journal."""


class SlotAttack(Attack):
    """Takes one slot at a time. A key is used for `slots_per_key` slots, or until it gets no more.

    One that `picks_slots` hands some back on purpose, or lets their leases lapse if it `holds_slots`.
    """

    slots_per_key: ClassVar[int | None] = None
    picks_slots: ClassVar[bool] = False
    holds_slots: ClassVar[bool] = False

    async def strike(self, raid: Raid) -> bool:
        taken = await raid.lease(self)
        if taken is None:
            return False
        identity, lease = taken
        try:
            forged = await self.forge(await raid.workshop.work(lease))
        except FileNotFoundError:  # the policy went while it was wanted
            forged = None
        if forged is None:
            if not self.holds_slots:
                await raid.door.give_back(identity, lease)
            if self.picks_slots:
                code, slot = HELD if self.holds_slots else HANDED_BACK, f"{lease.version}/{lease.slot}"
                raid.note(self, code, node=identity.node, slot=slot)
            return self.picks_slots
        await raid.submit(self, identity, lease, forged)
        return True

    @abstractmethod
    async def forge(self, work: Work) -> Forged | None:
        """Return what to send for a slot, or None to hand it back."""


class SelectiveAttack(SlotAttack):
    """Does the slots that it likes honestly, and lets the lease of each other one lapse."""

    stands_for = "doing some slots and letting go others (a kind of problem, groups with signal, good ones)"
    stopped_by = frozenset({"done_by_others", "left_over"})
    picks_slots = holds_slots = True

    async def forge(self, work: Work) -> Forged | None:
        return None if await self.dislikes(work) else submission(await work.honest(), hostile=False)

    @abstractmethod
    async def dislikes(self, work: Work) -> bool:
        """Return whether the slot is to be withheld."""


class DoorAttack(Attack):
    """Sends requests that are refused, or ought to be; takes no part in the work."""


def submission(rollouts: Sequence[Rollout], *, hostile: bool = True, note: str = "") -> Forged:
    """Rollouts as a worker sends them."""
    return Forged(write_rollouts(rollouts), hostile=hostile, note=note)


async def unless_forced(work: Work, rollouts: Sequence[Rollout]) -> Forged:
    """Rollouts with true proofs: nothing is wrong with them where their tokens happen to be the forced ones."""
    forced = [rollout.completion_ids for rollout in await work.honest()]
    sent = [rollout.completion_ids for rollout in rollouts]
    return submission(rollouts, hostile=sent != forced, note=f"{sum(map(list.__ne__, sent, forced))} rows differ")
