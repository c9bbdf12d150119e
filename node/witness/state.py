"""What a witness has signed: one file per log, on disk before a signature is shown (c2sp.org/tlog-witness).

The file is the checkpoint's note with the log's signature and the witness's own. A witness that has lost it, or goes on
from an older copy, may sign a second history: it belongs to no backup.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.errors import StateError
from node.protocol.checkpoints import (
    Checkpoint,
    WitnessedCheckpoint,
    open_witnessed,
    origin_hash,
    parse_add_checkpoint,
    parse_checkpoint,
)
from node.protocol.merkle import EMPTY_ROOT, ProofInvalid, verify_consistency
from node.protocol.notes import (
    MAX_NOTE_BYTES,
    KeyKind,
    Note,
    NoteSignature,
    VerifierKey,
    cosign_text,
    join_note,
    parse_note,
)
from shardcast.errors import BadSignature, Malformed, PeerFault
from shardcast.files import FolderLock, read_bounded, write_atomically

logger = logging.getLogger(__name__)

SIZE_TYPE: Final = "text/x.tlog.size"
TEXT_TYPE: Final = "text/plain"


class WitnessRefusal(Exception):
    """A checkpoint that is not signed: the HTTP `status`, and the body that says why."""

    def __init__(self, status: int, body: str, *, content_type: str = TEXT_TYPE) -> None:
        super().__init__(body)
        self.status, self.body, self.content_type = status, f"{body}\n", content_type


class WitnessState:
    """The newest checkpoint of each log that is witnessed; thread-safe, and alone in its folder."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        key: Ed25519PrivateKey,
        logs: Iterable[VerifierKey],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read what was signed before; raises StateError if that is damaged, LocalFault if the folder is in use."""
        self._folder, self._key, self._clock = folder, key, clock
        self.verifier = VerifierKey(name, KeyKind.WITNESS, key.public_key().public_bytes_raw())
        self._logs = {log.name: log for log in logs}
        self._locks = {origin: threading.Lock() for origin in self._logs}
        self._origins = {origin_hash(origin): origin for origin in self._logs}
        self._folder_lock = FolderLock(folder)
        try:
            self._newest = {origin: self._load(log) for origin, log in self._logs.items()}
        except StateError:
            self.close()
            raise

    def close(self) -> None:
        """Leave the folder to others."""
        self._folder_lock.release()

    def newest(self, hashed_origin: str) -> bytes | None:
        """Return the note of the newest checkpoint that was signed of a log; None without one."""
        found = self._newest.get(self._origins.get(hashed_origin, ""))
        return None if found is None else found.note.encode()

    def add(self, body: bytes) -> bytes:
        """Sign the checkpoint of a request, once it is on disk; return the signature's line.

        Raises WitnessRefusal, and LocalFault where it cannot be kept.
        """
        try:
            request = parse_add_checkpoint(body)
            note = parse_note(request.note)
            checkpoint = parse_checkpoint(note.text)
        except Malformed as error:
            raise WitnessRefusal(400, str(error)) from error
        log = self._logs.get(checkpoint.origin)
        if log is None:
            raise WitnessRefusal(404, "This witness was not told of that log.")
        own = _signed_by(log, note)
        if request.old > checkpoint.size:
            raise WitnessRefusal(400, "The old size is larger than the checkpoint's.")
        with self._locks[log.name]:
            before = self._newest[log.name]
            known = Checkpoint(log.name, 0, EMPTY_ROOT) if before is None else before.checkpoint
            if request.old != known.size:
                raise WitnessRefusal(409, str(known.size), content_type=SIZE_TYPE)
            self._check_extends(known, checkpoint, request.proof, note)
            last = 0 if before is None else before.witnesses[self.verifier]
            return self._sign(log, checkpoint, note.text, own, at=max(int(self._clock()), last))

    def _sign(self, log: VerifierKey, checkpoint: Checkpoint, text: bytes, own: NoteSignature, *, at: int) -> bytes:
        """Keep the checkpoint, then return the signature. A clock that went back dates none before the last."""
        cosignature = cosign_text(text, name=self.verifier.name, key=self._key, at=at)
        signed = Note(text, (own, cosignature))
        write_atomically(self._path(log), join_note(signed.text, signed.signatures))
        self._newest[log.name] = WitnessedCheckpoint(checkpoint, signed, {self.verifier: at})
        return cosignature.line

    def _check_extends(self, known: Checkpoint, checkpoint: Checkpoint, proof: tuple[bytes, ...], note: Note) -> None:
        try:
            verify_consistency(
                first=known.size,
                first_root=known.root,
                second=checkpoint.size,
                second_root=checkpoint.root,
                proof=proof,
            )
        except ProofInvalid as error:
            logger.error(  # noqa: TRY400  (the traceback says nothing)
                "log %s: a signed checkpoint of %d entries is not shown to extend the %d seen: %s",
                known.origin,
                checkpoint.size,
                known.size,
                error,
            )
            if checkpoint.size == known.size > 0:
                self._keep_evidence(known.origin, note)
            raise WitnessRefusal(422, f"Not shown to extend {known.size} entries: {error}.") from error

    def _keep_evidence(self, origin: str, note: Note) -> None:
        """Keep a second root that the log signed for one size, the first that comes: no more prove more."""
        path = self._path(self._logs[origin]).with_suffix(".forked")
        if not path.exists():
            write_atomically(path, note.encode())

    def _path(self, log: VerifierKey) -> Path:
        return self._folder / f"{origin_hash(log.name)}.checkpoint"

    def _load(self, log: VerifierKey) -> WitnessedCheckpoint | None:
        path = self._path(log)
        try:
            kept = open_witnessed(read_bounded(path, max_bytes=MAX_NOTE_BYTES), log=log, witnesses=[self.verifier])
        except FileNotFoundError:
            return None
        except (OSError, PeerFault) as error:
            raise StateError(f"{path} is not what this witness signed of {log.name} ({error}).") from error
        if self.verifier not in kept.witnesses:
            raise StateError(f"{path} was signed under another key or name than this witness has.")
        return kept


def _signed_by(log: VerifierKey, note: Note) -> NoteSignature:
    try:
        return note.verify([log])[log]
    except (BadSignature, KeyError) as error:
        raise WitnessRefusal(403, "The checkpoint is not signed by the log's key.") from error
