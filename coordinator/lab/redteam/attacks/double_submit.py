"""One lease, several submissions."""

from __future__ import annotations

from coordinator.lab.redteam.attack import DoorAttack, submission
from coordinator.lab.redteam.raid import Raid


class DoubleSubmit(DoorAttack):
    """Honest work, and then once more: the same file, and another one."""

    name = "double-submit"
    about = "does a slot honestly, and submits for its lease again"
    stands_for = "submitting another's work as one's own"
    stopped_by = frozenset({"duplicate_submission"})

    async def strike(self, raid: Raid) -> bool:
        taken = await raid.lease(self)
        if taken is None:
            return False
        identity, lease = taken
        try:
            work = await raid.workshop.work(lease)
            honest = submission(await work.honest(), hostile=False)
        except FileNotFoundError:
            return False
        await raid.submit(self, identity, lease, honest)
        for note, body in (("the same", honest.body), ("another", b"x" * 1000)):
            answer, _ = await raid.door.submit(identity, lease, body)
            raid.note(self, answer.code, node=identity.node, note=note)
        return True
