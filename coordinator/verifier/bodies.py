"""Reading the bodies of claimed submissions, from the blob store or as uploads.

The verifier is an upload's first reader. The store has verified its SHA-256; the signed BLAKE3 is checked here. If it
differs, the sender signed for two files at once, which its request and the bytes prove: the body is kept under its
actual digest, and the verdict names that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from coordinator.errors import CorruptRead, StorageFault, StoreAway
from coordinator.run.home import Home
from coordinator.storage import uploads
from coordinator.storage.blobs import Upload, UploadStore
from coordinator.storage.verdicts import QueueItem
from node.protocol.admission import Outcome, Verdict
from node.protocol.reasons import Reason
from node.submission.reader import VerifierFailed
from shardcast.wire import digest

log = logging.getLogger(__name__)


class BodyUnavailable(VerifierFailed):
    """A body cannot be read at the moment, or is read corrupted, and may be read well later."""


def body_reader(home: Home) -> BodyReader:
    """Return the reader that fits the run's blob store."""
    store = home.blobs.uploads
    return BodyReader(home) if store is None else UploadReader(home, store)


class BodyReader:
    """Reads the bodies of one verifier's claimed submissions as blobs; every method may block and raise OSError.

    `read` only where the store is away: one body on a bad part of the disk must not keep others waiting.
    """

    def __init__(self, home: Home) -> None:
        self._home = home

    def load_uploads(self, claimed: Sequence[QueueItem]) -> None:
        """Look up which of `claimed` are uploads; call once per batch, before `read`."""

    def read(self, claimed: QueueItem) -> bytes | Verdict:
        """Return the body, or the verdict if it cannot be read or is not the signed one; raises BodyUnavailable."""
        try:
            return self._fetch(claimed)
        except OSError as error:
            if isinstance(error, StoreAway) and not isinstance(error, CorruptRead):
                raise
            raise BodyUnavailable(f"its body is unavailable: {error}") from error
        except StorageFault as error:
            log.warning(
                "submission %s… cannot be decided, its body cannot be read: %s; put the blob back from a backup, or "
                "its slot is leased again",
                claimed.submission[:16],
                error,
            )
            detail = f"{type(error).__name__}."
            return Verdict(outcome=Outcome.INDETERMINATE, reason=Reason.VERIFIER_FAILED, detail=detail)

    def _fetch(self, claimed: QueueItem) -> bytes | Verdict:
        return self._home.blobs.get(claimed.body, max_bytes=self._home.spec.limits.max_submission_bytes)

    def keep(self, claimed: QueueItem) -> QueueItem:
        """Make an upload a blob, before its verdict is recorded; return the item with the body's actual digest."""
        return claimed

    def release(self, claimed: QueueItem) -> None:
        """Remove an upload that became a blob; if this fails, `uploads.sweep` does it."""


class UploadReader(BodyReader):
    """Reads bodies that may still be uploads in an object store."""

    def __init__(self, home: Home, store: UploadStore) -> None:
        super().__init__(home)
        self._store = store
        self._uploads: dict[str, Upload] = {}
        self._names: dict[str, str] = {}

    def load_uploads(self, claimed: Sequence[QueueItem]) -> None:
        self._names.clear()
        with self._home.database.read() as connection:
            self._uploads = uploads.of_submissions(connection, [each.submission for each in claimed])

    def _fetch(self, claimed: QueueItem) -> bytes | Verdict:
        upload = self._uploads.get(claimed.submission)
        if upload is None:
            return super()._fetch(claimed)
        data = self._store.fetch(upload)
        found = self._names[claimed.submission] = digest(data)
        if found == claimed.body:
            return data
        detail = f"What was uploaded has the BLAKE3 {found[:16]}…, not {claimed.body[:16]}…."
        return Verdict(outcome=Outcome.REJECTED, reason=Reason.WRONG_BODY, detail=detail)

    def keep(self, claimed: QueueItem) -> QueueItem:
        name = self._names.get(claimed.submission)
        if name is None:
            return claimed
        try:
            self._store.keep(self._uploads[claimed.submission], name)
        except StorageFault:
            log.warning("the upload of %s is gone: another verifier was faster", claimed.submission[:16])
        return replace(claimed, body=name)

    def release(self, claimed: QueueItem) -> None:
        if claimed.submission not in self._names:
            return
        upload = self._uploads.pop(claimed.submission)
        try:
            self._store.discard(upload)
        except OSError as error:
            log.warning("upload of %s not removed, left for the sweep: %s", claimed.submission[:16], error)
            return
        with self._home.database.write(durable=False) as connection:
            uploads.forget(connection, upload)
