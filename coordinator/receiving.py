"""How bodies come in and evidence goes out, with a folder of blobs and with an object store.

With a folder the coordinator takes a body as it arrives. With an object store it never does: the sender announces the
body, puts it there by an offer (`coordinator.storage.blobs`), and submits; the coordinator only asks the store whether
it is there. What a store keeps is sent on to auditors by the coordinator: they follow no redirects, and whoever reads
evidence needs no way to the store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

import anyio
from anyio import to_thread
from fastapi import Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from coordinator.errors import StorageFault
from coordinator.service import Coordinator
from coordinator.signed import SignedRequests, check_body, read_message
from coordinator.storage.blobs import Upload, UploadStore
from coordinator.storage.folder_blobs import FolderBlobs
from coordinator.storage.uploads import OFFER_SECONDS
from node.protocol.messages import RequestClaim, UploadReply, UploadRequest
from node.protocol.reasons import Reason, Refusal
from shardcast.wire import is_digest

UPLOAD_DEADLINE_SECONDS = 120.0
STORE_THREADS: Final = 16
"""A store that hangs must not take the threads that answer everything else."""

_BYTES = "application/octet-stream"
_PIECE_BYTES: Final = 256 * 1024

T = TypeVar("T")


class Receiving:
    """The submissions and the evidence of one run."""

    def __init__(self, coordinator: Coordinator, signed: SignedRequests) -> None:
        self._coordinator, self._signed = coordinator, signed
        self._threads = anyio.CapacityLimiter(STORE_THREADS)
        self._uploading: set[str] = set()

    async def body(self, request: Request, node: str, lease_id: str, *, envelope: bytes, claim: RequestClaim) -> str:
        """Take a body as it arrives, and keep it if it is what was signed and the lease still holds."""
        blobs = self._coordinator.home.blobs
        if not isinstance(blobs, FolderBlobs):
            raise Refusal(Reason.UPLOAD_FIRST, "Bodies are not taken here.")
        if lease_id in self._uploading:
            raise Refusal(Reason.TOO_MANY_REQUESTS, "This lease is being submitted by another request.")
        self._uploading.add(lease_id)
        try:
            with blobs.incoming(max_bytes=claim.body_bytes) as body, blobs.incoming(max_bytes=len(envelope)) as signed:
                signed.write(envelope)
                try:
                    async with asyncio.timeout(UPLOAD_DEADLINE_SECONDS):
                        async for piece in request.stream():
                            body.write(piece)
                except TimeoutError as error:
                    raise Refusal(Reason.BAD_REQUEST, "The body did not arrive in time.") from error
                check_body(claim, body.digest, body.size_bytes)
                submit = self._coordinator.submit
                return await run_in_threadpool(submit, node, lease_id, signed, body, now=time.time())
        finally:
            self._uploading.discard(lease_id)

    async def announcement(self, request: Request, lease_id: str) -> UploadReply:
        """Offer a place in the object store for what the holder of a lease announces."""
        store = self._store()

        def act(connection: Connection, node: str, body: bytes) -> Upload:
            asked = read_message(UploadRequest, body)
            upload = Upload(lease_id, asked.body, asked.sha256, asked.body_bytes)
            self._coordinator.announce(connection, node, upload, now=time.time())
            return upload

        upload = await self._signed.do(request, act)
        expires_at = int(time.time()) + OFFER_SECONDS
        url = await self._in_store(lambda: store.offer(upload, seconds=OFFER_SECONDS))
        return UploadReply(url=url, expires_at=expires_at)

    async def upload(self, node: str, lease_id: str, sha256: str, *, envelope: bytes, claim: RequestClaim) -> str:
        """Take a submission whose body the object store has."""
        store = self._store()
        if not is_digest(sha256):
            raise Refusal(Reason.NOT_FOUND, "Not a SHA-256.")
        upload = Upload(lease_id, claim.body_digest, sha256, claim.body_bytes)
        submit = self._coordinator.submit_upload
        return await self._in_store(lambda: submit(store, node, upload, envelope, now=time.time()))

    async def evidence(self, name: str) -> Response:
        """A blob, for anybody."""
        blobs = self._coordinator.home.blobs
        try:
            if isinstance(blobs, UploadStore):
                return await self._streamed(blobs, name)
            path = blobs.path(name) if isinstance(blobs, FolderBlobs) else None
        except StorageFault as error:
            raise Refusal(Reason.NOT_FOUND, "Not a blob's name.") from error
        if path is None or not await run_in_threadpool(path.exists):
            raise Refusal(Reason.NOT_FOUND, "No such blob.")
        return FileResponse(path, media_type=_BYTES)

    async def _streamed(self, store: UploadStore, name: str) -> Response:
        reading = await self._in_store(lambda: store.reading(name))
        if reading is None:
            raise Refusal(Reason.NOT_FOUND, "No such blob.")

        async def pieces() -> AsyncIterator[bytes]:
            try:
                while piece := await self._in_store(lambda: reading.read(_PIECE_BYTES)):
                    yield piece
            finally:
                reading.close()

        return StreamingResponse(pieces(), media_type=_BYTES, headers={"Content-Length": str(reading.size_bytes)})

    def _store(self) -> UploadStore:
        blobs = self._coordinator.home.blobs
        if not isinstance(blobs, UploadStore):
            raise Refusal(Reason.NOT_FOUND, "This run has no object store; submit the body itself.")
        return blobs

    async def _in_store(self, call: Callable[[], T]) -> T:
        return await to_thread.run_sync(call, limiter=self._threads)
