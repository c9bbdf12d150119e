"""Intake by an object store: no body passes through the coordinator.

The sender announces the body, uploads it to a presigned URL, and submits; the coordinator only checks that the object
exists. Evidence is proxied by the coordinator: auditors follow no redirects and need no access to the store.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Final, NoReturn, TypeVar

import anyio
from anyio import to_thread
from blake3 import blake3
from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from coordinator.errors import CorruptRead, StorageFault
from coordinator.http.intake.base import Intake, Submitter
from coordinator.run.service import Coordinator
from coordinator.storage.blobs import Upload, UploadStore
from coordinator.storage.uploads import OFFER_SECONDS
from node.protocol.endpoints import BYTES
from node.protocol.messages import UploadReply
from node.protocol.reasons import Reason, Refusal
from shardcast.wire import is_digest

STORE_THREADS: Final = 16
"""Threads for store requests, so that a hanging store does not exhaust the server's thread pool."""

_PIECE_BYTES: Final = 256 * 1024

T = TypeVar("T")


class StoreIntake(Intake):
    """Has senders upload bodies to an object store."""

    def __init__(self, coordinator: Coordinator, store: UploadStore) -> None:
        self._coordinator, self._store = coordinator, store
        self._threads = anyio.CapacityLimiter(STORE_THREADS)

    async def receive_body(self, request: Request, sender: Submitter) -> NoReturn:  # noqa: ARG002  (of the port)
        raise Refusal(Reason.UPLOAD_FIRST, "This run's bodies are uploaded to an object store first.")

    def require_uploads(self) -> None:
        return

    async def offer(self, upload: Upload) -> UploadReply:
        expires_at = int(time.time()) + OFFER_SECONDS
        url = await self._in_store(lambda: self._store.offer(upload, seconds=OFFER_SECONDS))
        return UploadReply(url=url, expires_at=expires_at)

    async def queue_upload(self, sender: Submitter, sha256: str) -> str:
        if not is_digest(sha256):
            raise Refusal(Reason.NOT_FOUND, "Not a SHA-256.")
        upload = Upload(sender.lease_id, sender.claim.body_digest, sha256, sender.claim.body_bytes)
        submit = self._coordinator.submit_upload
        return await self._in_store(lambda: submit(self._store, sender.node, upload, sender.envelope, now=time.time()))

    async def evidence(self, name: str) -> Response:
        try:
            stream = await self._in_store(lambda: self._store.open_stream(name))
        except StorageFault as error:
            raise Refusal(Reason.NOT_FOUND, "Not a blob's name.") from error
        if stream is None:
            raise Refusal(Reason.NOT_FOUND, "No such blob.")

        async def pieces() -> AsyncIterator[bytes]:
            hasher, held = blake3(), b""
            try:
                while piece := await self._in_store(lambda: stream.read(_PIECE_BYTES)):
                    hasher.update(piece)
                    if held:
                        yield held
                    held = piece
                if hasher.hexdigest() != name:  # the end is held back, so that nobody takes it for the whole blob
                    raise CorruptRead(f"the object store sent other bytes than blob {name}")
                yield held
            finally:
                stream.close()

        return StreamingResponse(pieces(), media_type=BYTES, headers={"Content-Length": str(stream.size_bytes)})

    async def _in_store(self, call: Callable[[], T]) -> T:
        return await to_thread.run_sync(call, limiter=self._threads)
