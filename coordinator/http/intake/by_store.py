"""Intake by an object store: no body passes through the coordinator.

The sender announces the body, puts it into the store by an offer (`coordinator.storage.blobs`), and submits; the
coordinator only asks the store whether it is there. What a store keeps is sent on to auditors by the coordinator: they
follow no redirects, and whoever reads evidence needs no way to the store.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Final, NoReturn, TypeVar

import anyio
from anyio import to_thread
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from coordinator.errors import StorageFault
from coordinator.http.intake.base import Intake, Submitter
from coordinator.run.service import Coordinator
from coordinator.storage.blobs import Upload, UploadStore
from coordinator.storage.uploads import OFFER_SECONDS
from node.protocol.endpoints import BYTES
from node.protocol.messages import UploadReply
from node.protocol.reasons import Reason, Refusal
from shardcast.wire import is_digest

STORE_THREADS: Final = 16
"""A store that hangs must not take the threads that answer everything else."""

_PIECE_BYTES: Final = 256 * 1024

T = TypeVar("T")


class StoreIntake(Intake):
    """Bodies by way of an object store that the senders reach themselves."""

    def __init__(self, coordinator: Coordinator, store: UploadStore) -> None:
        self._coordinator, self._store = coordinator, store
        self._threads = anyio.CapacityLimiter(STORE_THREADS)

    async def take_body(self, request: Request, sender: Submitter) -> NoReturn:  # noqa: ARG002  (of the port)
        raise Refusal(Reason.UPLOAD_FIRST, "Bodies are not taken here.")

    def check_uploads(self) -> None:
        return

    async def offer(self, upload: Upload) -> UploadReply:
        expires_at = int(time.time()) + OFFER_SECONDS
        url = await self._in_store(lambda: self._store.offer(upload, seconds=OFFER_SECONDS))
        return UploadReply(url=url, expires_at=expires_at)

    async def take_upload(self, sender: Submitter, sha256: str) -> str:
        if not is_digest(sha256):
            raise Refusal(Reason.NOT_FOUND, "Not a SHA-256.")
        upload = Upload(sender.lease_id, sender.claim.body_digest, sha256, sender.claim.body_bytes)
        submit = self._coordinator.submit_upload
        return await self._in_store(lambda: submit(self._store, sender.node, upload, sender.envelope, now=time.time()))

    async def evidence(self, name: str) -> Response:
        try:
            reading = await self._in_store(lambda: self._store.reading(name))
        except StorageFault as error:
            raise Refusal(Reason.NOT_FOUND, "Not a blob's name.") from error
        if reading is None:
            raise Refusal(Reason.NOT_FOUND, "No such blob.")

        async def pieces() -> AsyncIterator[bytes]:
            try:
                while piece := await self._in_store(lambda: reading.read(_PIECE_BYTES)):
                    yield piece
            finally:
                reading.close()

        return StreamingResponse(pieces(), media_type=BYTES, headers={"Content-Length": str(reading.size_bytes)})

    async def _in_store(self, call: Callable[[], T]) -> T:
        return await to_thread.run_sync(call, limiter=self._threads)
