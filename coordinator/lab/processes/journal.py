"""What an attacker says that it did: one JSON object a line, written before its answer is known to anybody else.

This is the ground truth of a red team's run. Which submissions were hostile cannot be told from the coordinator's
log, which only says what the coordinator thought of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

NODES = "nodes"
JOURNAL = "journal.ndjson"
STORED = "stored"
"""The code of a submission that the door took: what became of it is in the log."""
HANDED_BACK = "handed_back"
"""The code of a slot that was not wanted: who did it instead is in the log."""
HELD = "withheld"
"""The code of a slot that was kept until its lease ended, likewise."""
ACCEPTED = "accepted"
"""The code of a request that succeeded."""


class JournalEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One try, or `count` alike. `hostile` is whether anything in it is not what an honest node would send.

    `submission` is set where the door stored one; `code` is STORED, ACCEPTED, the coordinator's reason code, or what
    the connection came to ("closed", "timeout"). `slot` names the slot as version/number.
    """

    at: float
    attack: str
    node: str
    hostile: bool
    code: str
    submission: str | None = None
    slot: str | None = None
    note: str = ""
    count: int = 1


class Journal:
    """Appends to `folder`; every line is complete when the call returns."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / JOURNAL).open("ab", buffering=0)
        self._nodes = (folder / NODES).open("ab", buffering=0)
        self.stored = sum(entry.hostile and entry.code == STORED for entry in read_journal(folder))
        """Hostile slots that the door took, an earlier process's included."""

    def write(
        self,
        attack: str,
        node: str,
        *,
        code: str,
        hostile: bool = True,
        submission: str | None = None,
        slot: str | None = None,
        note: str = "",
        count: int = 1,
    ) -> None:
        """Append one attempt."""
        entry = JournalEntry(
            at=time.time(),
            attack=attack,
            node=node,
            hostile=hostile,
            code=code,
            submission=submission,
            slot=slot,
            note=note,
            count=count,
        )
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self.stored += hostile and code == STORED

    def introduce(self, node: str) -> None:
        """Append a new identity of this attacker."""
        self._nodes.write(node.encode() + b"\n")

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._nodes.close()


def read_journal(folder: Path) -> Iterator[JournalEntry]:
    """Read a journal's entries; a last line that a kill cut short is skipped."""
    path = folder / JOURNAL
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield msgspec.json.decode(line, type=JournalEntry)


def read_nodes(folder: Path) -> frozenset[str]:
    """Read the node ids that an attacker has used so far."""
    path = folder / NODES
    return frozenset(path.read_text(encoding="ascii").split()) if path.exists() else frozenset()
