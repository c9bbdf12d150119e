"""Intake into a folder of blobs: bodies are streamed through the coordinator."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NoReturn

from fastapi import Request, Response
from fastapi.responses import FileResponse
from starlette.concurrency import run_in_threadpool

from coordinator.errors import DamagedBlob, StorageFault
from coordinator.http.intake.base import Intake, Submitter
from coordinator.http.signed_requests import check_body
from coordinator.http.write_queue import WriteQueue
from coordinator.run.service import Coordinator
from coordinator.storage.blobs import Upload
from coordinator.storage.folder_blobs import FolderBlobs
from node.protocol.endpoints import BYTES
from node.protocol.reasons import Reason, Refusal

log = logging.getLogger(__name__)

UPLOAD_DEADLINE_SECONDS: Final = 120.0
SYNCS_AT_ONCE: Final = 32
"""Bodies that are synced to disk together; the file system writes its journal once for all of them."""


class FolderIntake(Intake):
    """Checks each body against its signed digest before the blob gets its name."""

    def __init__(self, coordinator: Coordinator, blobs: FolderBlobs, writes: WriteQueue) -> None:
        self._coordinator, self._blobs, self._writes = coordinator, blobs, writes
        self._uploading: set[str] = set()
        # Not by run_in_threadpool, whose way there and back takes 50 µs more.
        self._syncs = ThreadPoolExecutor(SYNCS_AT_ONCE, thread_name_prefix="sync of bodies")

    async def receive_body(self, request: Request, sender: Submitter) -> str:
        if sender.lease_id in self._uploading:
            raise Refusal(Reason.TOO_MANY_REQUESTS, "This lease is being submitted by another request.")
        self._uploading.add(sender.lease_id)
        try:
            with self._blobs.incoming(max_bytes=sender.claim.body_bytes) as body:
                try:
                    async with asyncio.timeout(UPLOAD_DEADLINE_SECONDS):
                        async for piece in request.stream():
                            body.write(piece)
                except TimeoutError as error:
                    raise Refusal(Reason.BAD_REQUEST, "The body did not arrive in time.") from error
                check_body(sender.claim, body.digest, body.size_bytes)
                await asyncio.get_running_loop().run_in_executor(self._syncs, body.sync)
                submit, envelope, now = self._coordinator.submit, sender.envelope, time.time()
                return await self._writes.run(
                    lambda: submit(sender.node, sender.lease_id, envelope, body, now=now), is_last=True
                )
        finally:
            self._uploading.discard(sender.lease_id)

    def require_uploads(self) -> NoReturn:
        raise Refusal(Reason.NOT_FOUND, "This run has no object store; submit the body itself.")

    async def offer(self, upload: Upload) -> NoReturn:  # noqa: ARG002  (of the port)
        self.require_uploads()

    async def queue_upload(self, sender: Submitter, sha256: str) -> NoReturn:  # noqa: ARG002  (of the port)
        self.require_uploads()

    async def evidence(self, name: str) -> Response:
        try:
            path = await run_in_threadpool(self._blobs.verified_path, name)
        except DamagedBlob as error:
            log.warning("%s, and is not served: put it back from a backup", error)
            raise Refusal(Reason.NOT_FOUND, "That blob is damaged here.") from error
        except StorageFault as error:
            raise Refusal(Reason.NOT_FOUND, "No such blob.") from error
        return FileResponse(path, media_type=BYTES)
