"""The port of `coordinator.http.intake`."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from fastapi import Request, Response

from coordinator.storage.blobs import Upload
from node.protocol.messages import RequestClaim, UploadReply


@dataclass(frozen=True, slots=True)
class Submitter:
    """An accepted submission request: node, lease and signed claim. Its body is not read yet."""

    node: str
    lease_id: str
    envelope: bytes
    claim: RequestClaim


class Intake(abc.ABC):
    """Receives the submissions of one run and serves its evidence. Every method raises Refusal."""

    @abc.abstractmethod
    async def receive_body(self, request: Request, sender: Submitter) -> str:
        """Stream the body of `request` into the blob store and queue it; return the submission's id."""

    @abc.abstractmethod
    def require_uploads(self) -> None:
        """Raise Refusal unless bodies are uploaded to an object store."""

    @abc.abstractmethod
    async def offer(self, upload: Upload) -> UploadReply:
        """Return a presigned URL for the announced body."""

    @abc.abstractmethod
    async def queue_upload(self, sender: Submitter, sha256: str) -> str:
        """Queue a submission whose body, with this SHA-256, is in the object store; return the submission's id."""

    @abc.abstractmethod
    async def evidence(self, name: str) -> Response:
        """Return blob `name`; anybody may read it."""
