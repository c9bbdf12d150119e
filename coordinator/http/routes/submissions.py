"""Submissions: bodies, sent directly or uploaded to an object store, and receipts."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from coordinator.http.intake import Submitter
from coordinator.http.load_shedding import RETRY_SECONDS, RequestClass
from coordinator.http.rate_limits import TooManyRequests
from coordinator.http.routing import ServiceDep, SignedCall, respond, respond_bytes, route, service_of, signed
from coordinator.http.service import Service
from coordinator.http.shutdown import Shutdown
from coordinator.http.signed_requests import open_request, read_envelope
from coordinator.storage.blobs import Upload
from coordinator.storage.database import Connection
from node.protocol import endpoints
from node.protocol.endpoints import Endpoint, Pending
from node.protocol.messages import SubmissionReply, UploadRequest
from node.protocol.reasons import Reason, Refusal
from node.runtime.logs import bound
from shardcast.wire import encode, is_digest

log = logging.getLogger(__name__)

router = APIRouter()


async def submitter(request: Request, lease_id: str) -> Submitter:
    """Dependency: verify and use up the signed request; refusals come before the body is read."""
    service, envelope = await service_of(request), read_envelope(request)
    coordinator = service.coordinator

    node, claim = open_request(envelope)
    limit = coordinator.home.spec.limits.max_submission_bytes
    if claim.body_bytes > limit:
        raise Refusal(Reason.OVERSIZED_BODY, f"{claim.body_bytes} bytes, at most {limit} are taken.")

    def check(transaction: Connection) -> None:
        coordinator.check_may_submit(transaction, node, lease_id, now=time.time())

    await service.signed.execute(request, node, claim, check)
    return Submitter(node, lease_id, envelope, claim)


def _queued(endpoint: Endpoint[Any, SubmissionReply], submission: str, sender: Submitter, service: Service) -> Response:
    service.metrics.submissions.inc()
    with bound(submission=submission, node=sender.node, lease=sender.lease_id):
        log.debug("submission %s… of %s… queued", submission[:16], sender.node[:8])
    return respond(endpoint, SubmissionReply(submission=submission))


@route(router, endpoints.SUBMIT)
async def submit(request: Request, service: ServiceDep, sender: Annotated[Submitter, Depends(submitter)]) -> Response:
    submission = await service.intake.receive_body(request, sender)
    return _queued(endpoints.SUBMIT, submission, sender, service)


@route(router, endpoints.SUBMIT_UPLOAD)
async def submit_upload(service: ServiceDep, sender: Annotated[Submitter, Depends(submitter)], sha256: str) -> Response:
    submission = await service.intake.queue_upload(sender, sha256)
    return _queued(endpoints.SUBMIT_UPLOAD, submission, sender, service)


async def _require_uploads(service: ServiceDep) -> None:
    service.intake.require_uploads()


@route(router, endpoints.ANNOUNCE_UPLOAD, dependencies=[Depends(_require_uploads)])
async def announce(
    call: Annotated[SignedCall[UploadRequest], Depends(signed(endpoints.ANNOUNCE_UPLOAD))], lease_id: str
) -> Response:
    def act(transaction: Connection, node: str, request: UploadRequest) -> Upload:
        upload = Upload(lease_id, request.body, request.sha256, request.body_bytes)
        call.service.coordinator.announce_upload(transaction, node, upload, now=time.time())
        return upload

    offer = await call.service.intake.offer(await call.execute(act))
    return respond(endpoints.ANNOUNCE_UPLOAD, offer, headers={"Cache-Control": "no-store"})


@route(router, endpoints.RECEIPT)
async def receipt(
    request: Request,
    service: ServiceDep,
    submission: str,
    wait: Annotated[float, Query(ge=0, le=endpoints.MAX_WAIT_SECONDS, allow_inf_nan=False)] = 0.0,
) -> Response:
    if not is_digest(submission):
        raise Refusal(Reason.NOT_FOUND, "Not a submission's id.")
    read_receipt = partial(service.coordinator.receipt, submission)
    if not wait or not service.has_room_for_waiter:
        found = await service.reads.run(read_receipt)
        if wait and isinstance(found, Pending):
            detail = "There is no verdict yet, and too many wait for theirs."
            raise TooManyRequests(detail, retry_after_seconds=RETRY_SECONDS[RequestClass.WORK])
    else:
        async with service.verdicts.subscribe(submission) as decided:
            found = await service.reads.run(read_receipt)
            if isinstance(found, Pending):
                await _wait(request, decided, service.shutdown, seconds=wait)
                found = await service.reads.run(read_receipt)
    if isinstance(found, Pending):
        return Response(encode(found), status_code=202, media_type=endpoints.JSON)
    return respond_bytes(endpoints.RECEIPT, found)


async def _wait(request: Request, event: asyncio.Event, shutdown: Shutdown, *, seconds: float) -> None:
    """Wait for `event`, at most `seconds`, until shutdown or until the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        event.set()

    watching = asyncio.create_task(disconnected())
    try:
        with shutdown.waking(event):
            async with asyncio.timeout(seconds):
                await event.wait()
    except TimeoutError:
        pass
    finally:
        watching.cancel()
