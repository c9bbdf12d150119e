"""Submission upload, directly or through the run's object store: the coordinator's first reply tells which.

With a store: announce the file, PUT it to the presigned URL, submit. Both digests of the file are signed in each step,
so that nobody can substitute other bytes. Every step is idempotent, and a store failure repeats all: URLs expire within
minutes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from pathlib import Path
from typing import Final

from node.client.calls import CoordinatorReply, CoordinatorTransport, decoded, request_to
from node.client.http import Backoff, ExchangeLimits, measure_body
from node.client.object_store import put_file
from node.errors import BadReply, CoordinatorFault, Refused, StoreUnavailable
from node.protocol import endpoints
from node.protocol.messages import Lease, UploadRequest, slot_name
from node.protocol.reasons import Reason

log = logging.getLogger(__name__)

_FREE_TURNS: Final = 1
"""Retries without backoff, right after switching between the two ways."""


class SubmissionUploader:
    """Uploader of one node's submissions; remembers whether the run has an object store."""

    def __init__(self, caller: CoordinatorTransport, *, limits: ExchangeLimits, backoff: Backoff) -> None:
        self._caller = caller
        self._backoff = backoff
        self._limits = limits
        self._by_store = False
        self._store_is_away = False

    async def submit(self, lease: Lease, body: Path, *, patience_seconds: float) -> str:
        """Upload and return the submission's id (`CoordinatorClient.submit`); raises StoreUnavailable, too."""
        give_up_at = time.monotonic() + patience_seconds
        failures = 0
        while True:
            by_store = self._by_store
            try:
                if by_store:
                    return await self._by_the_store(lease, body, patience_seconds=patience_seconds)
                return await self._to_the_coordinator(lease, body, patience_seconds=patience_seconds)
            except Refused as error:
                no_store_here = by_store and error.code == Reason.NOT_FOUND
                if error.code != Reason.UPLOAD_FIRST and not no_store_here:
                    raise
                self._by_store = not no_store_here
                fault: CoordinatorFault = error
            except StoreUnavailable as error:
                self._note_away(error)
                fault = error
            failures += 1
            if failures <= _FREE_TURNS and self._by_store != by_store:
                continue
            delay = max(self._backoff.delay(failures), fault.retry_after_seconds or 0.0)
            if time.monotonic() + delay > give_up_at:
                raise fault
            await asyncio.sleep(delay)

    async def _to_the_coordinator(self, lease: Lease, body: Path, *, patience_seconds: float) -> str:
        names = {"lease_id": lease.lease_id}
        request = request_to(endpoints.SUBMIT, names=names, body=body, slot=slot_name(lease))
        return await self._caller.call(request, _acknowledged, patience_seconds=patience_seconds)

    async def _by_the_store(self, lease: Lease, body: Path, *, patience_seconds: float) -> str:
        blake3, body_bytes = await asyncio.to_thread(measure_body, body)
        sha256 = await asyncio.to_thread(_sha256, body)
        asked = UploadRequest(body=blake3, body_bytes=body_bytes, sha256=sha256)
        request = request_to(endpoints.ANNOUNCE_UPLOAD, names={"lease_id": lease.lease_id}, body=asked)
        url, coordinator = await self._caller.call(request, _offer, patience_seconds=patience_seconds)
        least = self._caller.reach(coordinator)
        await put_file(url, body, body_bytes=body_bytes, sha256=sha256, least=least, limits=self._limits)
        if self._store_is_away:
            self._store_is_away = False
            log.warning("the run's object store is back")
        names = {"lease_id": lease.lease_id, "sha256": sha256}
        request = request_to(endpoints.SUBMIT_UPLOAD, names=names, body=body, elsewhere=True, slot=slot_name(lease))
        return await self._caller.call(request, _acknowledged, patience_seconds=patience_seconds)

    def _note_away(self, error: StoreUnavailable) -> None:
        if not self._store_is_away:
            log.warning("%s Retrying until it does", error)
        self._store_is_away = True


def _acknowledged(answer: CoordinatorReply) -> str:
    if decoded(endpoints.SUBMIT, answer).submission != answer.request_id:
        raise BadReply(f"{answer.url} acknowledges another submission than the one that was sent.")
    return answer.request_id


def _offer(answer: CoordinatorReply) -> tuple[str, str]:
    return decoded(endpoints.ANNOUNCE_UPLOAD, answer).url, answer.url


def _sha256(body: Path) -> str:
    with body.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
