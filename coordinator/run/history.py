"""The log's history, remembered outside of the database.

A database that was restored from an older copy, or cut, looks whole, and whoever goes on with it signs a second
history: proof of fraud to everybody who has seen the first. So each process that signs or appends keeps the newest
checkpoint that it knows of in a file of its own folder, and does not start on a log that does not extend it:

    --data/log.checkpoint     the signed checkpoint that was last published, kept by the coordinator
    --state/log.seen          size and root of the log as a verifier or the trainer last left it, unsigned

Extension is judged by the stored Merkle tree, of which `swarmproof check` recomputes every node.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Final

from coordinator.errors import BadConfiguration, HistoryLost
from coordinator.storage import log
from coordinator.storage.database import Connection, Database
from node.protocol.checkpoints import Checkpoint, open_checkpoint, origin_of, parse_checkpoint
from node.protocol.notes import MAX_NOTE_BYTES
from shardcast.errors import PeerFault
from shardcast.files import read_bounded, sync_folder

PUBLISHED: Final = "log.checkpoint"
SEEN: Final = "log.seen"


def current_checkpoint(connection: Connection, *, run_id: str) -> Checkpoint:
    """Return size and root of the log."""
    size = log.size(connection)
    return Checkpoint(origin_of(run_id), size, log.root(connection, size))


class KeptHistory:
    """The kept checkpoint of one folder; thread-safe. With `signer`, it is a note signed by that key."""

    def __init__(self, folder: Path, *, run_id: str, signer: bytes | None = None) -> None:
        self.path = folder / (SEEN if signer is None else PUBLISHED)
        self._run_id, self._signer = run_id, signer
        self._lock = threading.Lock()
        self._kept_size: int | None = None

    def load(self) -> Checkpoint | None:
        """Return the kept checkpoint, None if there is none; raises BadConfiguration if it is not this run's."""
        try:
            data = read_bounded(self.path, max_bytes=MAX_NOTE_BYTES)
            if self._signer is not None:
                return open_checkpoint(data, run_id=self._run_id, signer=self._signer)
            kept = parse_checkpoint(data)
        except FileNotFoundError:
            return None
        except PeerFault as error:
            raise BadConfiguration(f"{self.path} cannot be read as a checkpoint of this run: {error}") from error
        if kept.origin != origin_of(self._run_id):
            raise BadConfiguration(
                f"{self.path} is the checkpoint of another run, {kept.origin[:32]}…: name the folder of this run, or a "
                "new one"
            )
        return kept

    def check(self, connection: Connection) -> Checkpoint | None:
        """Return the kept checkpoint if the log extends it, None if there is none; raises HistoryLost, StorageFault."""
        kept = self.load()
        if kept is None:
            return None
        size = log.size(connection)
        if size < kept.size:
            raise HistoryLost(f"the database is older than its log was: it has {size} entries{self._was(kept)}")
        if log.root(connection, kept.size) != kept.root:
            raise HistoryLost(f"the log of {size} entries in the database has another history{self._was(kept)}")
        return kept

    def _was(self, kept: Checkpoint) -> str:
        return f", and {self.path} keeps the checkpoint of {kept.size}; nothing was signed or appended"

    def keep(self, checkpoint: Checkpoint, data: bytes) -> None:
        """Replace what is kept by `data`, which holds `checkpoint`, unless as large a log is kept; raises OSError."""
        with self._lock:
            if self._kept_size is None:
                kept = self.load()
                self._kept_size = -1 if kept is None else kept.size
            if checkpoint.size <= self._kept_size:
                return
            # Other processes may have this folder, too.
            temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
            sync_folder(self.path.parent)
            self._kept_size = checkpoint.size

    def keep_current(self, database: Database) -> None:
        """Keep size and root of the log as it is now, unsigned; raises OSError."""
        with database.read() as connection:
            checkpoint = current_checkpoint(connection, run_id=self._run_id)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.keep(checkpoint, checkpoint.text)

    def set_aside(self) -> Path:
        """Rename the kept checkpoint, so that the log may go on from an older state; return its new path."""
        target = self.path.with_name(f"{self.path.name}.abandoned-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        self.path.rename(target)
        sync_folder(self.path.parent)
        return target
