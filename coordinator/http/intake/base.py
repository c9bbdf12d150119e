"""The port of `coordinator.http.intake`."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from fastapi import Request, Response

from coordinator.storage.blobs import Upload
from node.protocol.messages import RequestClaim, UploadReply


@dataclass(frozen=True, slots=True)
class Submitter:
    """The holder of a lease whose signed request was accepted, and what it signed for. No body was read yet."""

    node: str
    lease_id: str
    envelope: bytes
    claim: RequestClaim


class Intake(abc.ABC):
    """Takes the submissions of one run and serves its evidence. Every method raises Refusal."""

    @abc.abstractmethod
    async def take_body(self, request: Request, sender: Submitter) -> str:
        """Store the body of `request` as it arrives, and queue it; return the submission's id."""

    @abc.abstractmethod
    def check_uploads(self) -> None:
        """Refuse unless bodies are uploaded to an object store."""

    @abc.abstractmethod
    async def offer(self, upload: Upload) -> UploadReply:
        """Return where in the object store the holder of a lease may put the body that it announced."""

    @abc.abstractmethod
    async def take_upload(self, sender: Submitter, sha256: str) -> str:
        """Queue a submission whose body is in the object store; return the submission's id."""

    @abc.abstractmethod
    async def evidence(self, name: str) -> Response:
        """Return blob `name`, for anybody."""
