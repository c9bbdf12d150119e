"""What an auditor keeps of a run's log: the last consistent checkpoint, and proof of two histories."""

from __future__ import annotations

from pathlib import Path

from node.errors import StateError
from node.protocol.notes import MAX_NOTE_BYTES
from shardcast.errors import PeerFault
from shardcast.files import read_bounded, write_atomically
from shardcast.wire import digest


class CheckpointMemory:
    """Storage of the last consistent checkpoint of a run, and of evidence against its operator."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / f"{run_id}.checkpoint"

    def load(self) -> bytes | None:
        """Return the stored note, None without one; raises StateError if it is unreadable."""
        try:
            return read_bounded(self._path, max_bytes=MAX_NOTE_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, PeerFault) as error:
            raise StateError(f"{self._path} cannot be read ({error}); restore it, or use another --state.") from error

    def keep(self, note: bytes) -> None:
        """Replace the stored note."""
        write_atomically(self._path, note)

    def keep_evidence(self, first: bytes, second: bytes) -> Path:
        """Store two contradictory checkpoints in a folder of their own, and return it."""
        folder = self._folder / f"evidence-{digest(first + second)[:16]}"
        folder.mkdir(exist_ok=True)
        write_atomically(folder / "first.checkpoint", first)
        write_atomically(folder / "second.checkpoint", second)
        return folder
