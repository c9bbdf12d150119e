"""The body of a submission on its way to a verdict: from the object store, where its sender put it, to its name.

Here an upload is read for the first time. The store has held its sender to the SHA-256; whether the bytes have the
BLAKE3 that was signed as well is found here. If not, their sender has signed for two files at once, which its request
and the bytes prove to everybody. So they are kept under their own name, and the verdict names that one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from coordinator.errors import StorageFault
from coordinator.run.home import Home
from coordinator.storage import uploads
from coordinator.storage.blobs import Upload, UploadStore
from coordinator.storage.verdicts import Claimed
from node.protocol.admission import Outcome, Verdict
from node.protocol.reasons import Reason
from node.submission.reader import VerifierFailed
from node.verification.verify import undecided
from shardcast.wire import digest

log = logging.getLogger(__name__)


def bodies_of(home: Home) -> Bodies:
    """Return the reader that fits the run's blob store."""
    store = home.blobs.uploads
    return Bodies(home) if store is None else UploadedBodies(home, store)


class Bodies:
    """Reads the bodies of what one verifier has claimed, each under its name; all may block, and raise OSError."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def find(self, claimed: Sequence[Claimed]) -> None:
        """Look up which of `claimed` are uploads that have no name yet: none here."""

    def read(self, claimed: Claimed) -> bytes | Verdict:
        """Return what was submitted, or the verdict where that cannot be had or is not what was signed."""
        try:
            return self._fetch(claimed)
        except StorageFault as error:
            return undecided(VerifierFailed(f"the submission cannot be read: {error}"))

    def _fetch(self, claimed: Claimed) -> bytes | Verdict:
        return self._home.blobs.get(claimed.body, max_bytes=self._home.spec.limits.max_submission_bytes)

    def keep(self, claimed: Claimed) -> Claimed:
        """Give the body its name before the verdict says that it has one; return the claim by this name."""
        return claimed

    def release(self, claimed: Claimed) -> None:
        """Remove the upload of a body that has its name; if this fails, `uploads.sweep` does it."""


class UploadedBodies(Bodies):
    """Bodies that wait in an object store for their first reader."""

    def __init__(self, home: Home, store: UploadStore) -> None:
        super().__init__(home)
        self._store = store
        self._uploads: dict[str, Upload] = {}
        self._names: dict[str, str] = {}

    def find(self, claimed: Sequence[Claimed]) -> None:
        self._names.clear()
        with self._home.database.read() as connection:
            self._uploads = uploads.of_submissions(connection, [each.submission for each in claimed])

    def _fetch(self, claimed: Claimed) -> bytes | Verdict:
        upload = self._uploads.get(claimed.submission)
        if upload is None:
            return super()._fetch(claimed)
        data = self._store.fetch(upload)
        found = self._names[claimed.submission] = digest(data)
        if found == claimed.body:
            return data
        detail = f"What was uploaded has the BLAKE3 {found[:16]}…, not {claimed.body[:16]}…."
        return Verdict(outcome=Outcome.REJECTED, reason=Reason.WRONG_BODY, detail=detail)

    def keep(self, claimed: Claimed) -> Claimed:
        name = self._names.get(claimed.submission)
        if name is None:
            return claimed
        try:
            self._store.keep(self._uploads[claimed.submission], name)
        except StorageFault:  # a verifier that was faster has kept and removed it
            log.warning("the upload of %s is gone", claimed.submission[:16])
        return replace(claimed, body=name)

    def release(self, claimed: Claimed) -> None:
        if claimed.submission not in self._names:
            return
        upload = self._uploads.pop(claimed.submission)
        try:
            self._store.discard(upload)
        except OSError as error:
            log.warning("an upload is left to be swept: %s", error)
            return
        with self._home.database.write(durable=False) as connection:
            uploads.forget(connection, upload)
