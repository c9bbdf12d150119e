"""Somebody else's work."""

from __future__ import annotations

from coordinator.lab.redteam.attack import Forged, SlotAttack
from coordinator.lab.redteam.raid import Raid
from coordinator.lab.redteam.workshop import Work
from node.protocol.admission import Outcome
from node.protocol.messages import MAX_ENTRY_BYTES, LogEntry, VerdictEntry
from shardcast.wire import decode

LOOK_BACK = 64


class Copycat(SlotAttack):
    """Evidence is public: takes the file of a group that was admitted lately, and sends it for its own slot."""

    name = "copycat"
    about = "downloads an admitted submission, and sends it as its own"
    stands_for = "submitting another's work as one's own"
    stopped_by = frozenset({"duplicate_submission", "wrong_prompt", "wrong_seed"})

    def __init__(self) -> None:
        self._stolen: bytes | None = None

    async def strike(self, raid: Raid) -> bool:
        """Nothing to do before something was admitted."""
        self._stolen = await self._steal(raid)
        return self._stolen is not None and await super().strike(raid)

    async def forge(self, work: Work) -> Forged | None:  # noqa: ARG002  (whatever the slot is)
        """The stolen file as it is."""
        return None if self._stolen is None else Forged(self._stolen)

    async def _steal(self, raid: Raid) -> bytes | None:
        status = await raid.door.status()
        size = 0 if status is None else int(status["log_size"])
        answer = await raid.door.send("GET", f"/v1/log/entries?start={max(0, size - LOOK_BACK)}&end={size}")
        for line in reversed(answer.body.splitlines() if answer.accepted else []):
            entry: LogEntry = decode(LogEntry, line, max_bytes=MAX_ENTRY_BYTES)  # type: ignore[arg-type]
            if isinstance(entry, VerdictEntry) and entry.outcome is Outcome.ADMITTED:
                found = await raid.door.send("GET", f"/v1/blobs/{entry.body}")
                return found.body if found.accepted else None
        return None
