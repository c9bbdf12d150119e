"""Submissions: bodies, sent directly or uploaded to an object store, and receipts."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Request, Response

from coordinator.http.intake import Submitter
from coordinator.http.load_shedding import RETRY_SECONDS, RequestClass
from coordinator.http.rate_limits import OverloadRefusal
from coordinator.http.routing import plain_route, read_signed, respond, respond_bytes, service_of
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

_Wait = Annotated[float, msgspec.Meta(ge=0, le=endpoints.MAX_WAIT_SECONDS)]
_WAIT: Final = {"type": "number", "maximum": endpoints.MAX_WAIT_SECONDS, "minimum": 0, "default": 0.0}


async def submitter(request: Request) -> Submitter:
    """Verify and use up the signed request; refusals come before the body is read."""
    service, envelope, lease_id = service_of(request), read_envelope(request), request.path_params["lease_id"]
    coordinator = service.coordinator

    node, claim = open_request(envelope)
    limit = coordinator.home.spec.limits.max_submission_bytes
    if claim.body_bytes > limit:
        raise Refusal(Reason.OVERSIZED_BODY, f"{claim.body_bytes} bytes, at most {limit} are taken.")

    def check(transaction: Connection) -> None:
        coordinator.check_may_submit(transaction, node, lease_id, claimed=claim.slot, now=time.time())

    await service.signed.execute(request, node, claim, check)
    return Submitter(node, lease_id, envelope, claim)


def _queued(endpoint: Endpoint[Any, SubmissionReply], submission: str, sender: Submitter, service: Service) -> Response:
    service.metrics.submissions.inc()
    with bound(submission=submission, node=sender.node, lease=sender.lease_id):
        log.debug("submission %s… of %s… queued", submission[:16], sender.node[:8])
    return respond(endpoint, SubmissionReply(submission=submission))


@plain_route(router, endpoints.SUBMIT)
async def submit(request: Request) -> Response:
    service, sender = service_of(request), await submitter(request)
    submission = await service.intake.receive_body(request, sender)
    return _queued(endpoints.SUBMIT, submission, sender, service)


@plain_route(router, endpoints.SUBMIT_UPLOAD)
async def submit_upload(request: Request) -> Response:
    service, sender = service_of(request), await submitter(request)
    submission = await service.intake.queue_upload(sender, request.path_params["sha256"])
    return _queued(endpoints.SUBMIT_UPLOAD, submission, sender, service)


@plain_route(router, endpoints.ANNOUNCE_UPLOAD)
async def announce(request: Request) -> Response:
    service_of(request).intake.require_uploads()
    call, lease_id = await read_signed(endpoints.ANNOUNCE_UPLOAD, request), request.path_params["lease_id"]

    def act(transaction: Connection, node: str, message: UploadRequest) -> Upload:
        upload = Upload(lease_id, message.body, message.sha256, message.body_bytes)
        call.service.coordinator.announce_upload(transaction, node, upload, now=time.time())
        return upload

    offer = await call.service.intake.offer(await call.execute(act))
    return respond(endpoints.ANNOUNCE_UPLOAD, offer, headers={"Cache-Control": "no-store"})


@plain_route(router, endpoints.RECEIPT, query={"wait": _WAIT})
async def receipt(request: Request) -> Response:
    service, submission, wait = service_of(request), request.path_params["submission"], _wait_of(request)
    if not is_digest(submission):
        raise Refusal(Reason.NOT_FOUND, "Not a submission's id.")
    read_receipt = partial(service.coordinator.receipt, submission)
    if not wait or not service.has_room_for_waiter:
        found = await service.reads.run(read_receipt)
        if wait and isinstance(found, Pending):
            detail = "There is no verdict yet, and too many wait for theirs."
            raise OverloadRefusal(detail, retry_after_seconds=RETRY_SECONDS[RequestClass.WORK])
    else:
        async with service.verdicts.subscribe(submission) as decided:
            found = await service.reads.run(read_receipt)
            if isinstance(found, Pending):
                await _wait(request, decided, service.shutdown, seconds=wait)
                found = await service.reads.run(read_receipt)
    if isinstance(found, Pending):
        return Response(encode(found), status_code=202, media_type=endpoints.JSON)
    await service.history.kept()
    return respond_bytes(endpoints.RECEIPT, found)


def _wait_of(request: Request) -> float:
    """Return for how many seconds a request may wait; raises Refusal."""
    try:
        return msgspec.convert(request.query_params.get("wait", "0"), _Wait, strict=False)
    except msgspec.ValidationError as error:
        detail = f"`wait` is a number of seconds, at most {endpoints.MAX_WAIT_SECONDS:g}."
        raise Refusal(Reason.BAD_REQUEST, detail) from error


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
