"""The coordinator's HTTP service (docs/protocol.md, section 3).

Bodies are read with a byte limit and a deadline before anything parses them. Every refusal is an ErrorReply
with a stable code; anything unforeseen is a 500 that says nothing about the inside.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from coordinator.errors import StorageFault
from coordinator.limits import AddressLimiter
from coordinator.log_watch import LogWatch
from coordinator.metrics import Metrics
from coordinator.service import Coordinator
from coordinator.status import run_status
from coordinator.storage.log import MAX_ENTRIES_PER_READ
from node.protocol.messages import (
    MAX_MESSAGE_BYTES,
    ErrorReply,
    LeaseRequest,
    Registration,
    RelayAnnouncement,
    RequestClaim,
    SubmissionReply,
)
from node.protocol.reasons import Reason, Refusal
from node.protocol.requests import open_claim, read_authorization
from shardcast.errors import PeerFault
from shardcast.wire import decode, digest, encode, is_digest

log = logging.getLogger(__name__)

BODY_DEADLINE_SECONDS = 30.0
UPLOAD_DEADLINE_SECONDS = 120.0
RECEIPT_WAIT_MAX_SECONDS = 30.0
_STATUS = {
    Reason.BAD_REQUEST: 400,
    Reason.BAD_SIGNATURE: 401,
    Reason.REPLAYED_REQUEST: 401,
    Reason.CLOCK_SKEW: 401,
    Reason.WRONG_RUN: 401,
    Reason.UNKNOWN_IDENTITY: 401,
    Reason.FOREIGN_LEASE: 403,
    Reason.UNKNOWN_LEASE: 404,
    Reason.NOT_FOUND: 404,
    Reason.EXPIRED_LEASE: 409,
    Reason.STALE_POLICY: 409,
    Reason.DUPLICATE_SUBMISSION: 409,
    Reason.OVERSIZED_BODY: 413,
    Reason.BODY_MISMATCH: 422,
    Reason.TOO_MANY_REQUESTS: 429,
}
_METHODS = frozenset(("GET", "POST", "PUT"))
_BYTES = "application/octet-stream"
_JSON = "application/json"
T = TypeVar("T")


def create_app(coordinator: Coordinator, *, registrations_per_minute: int = 120) -> FastAPI:
    """The service of one run. One address may register nodes and announce relays so many times a minute."""
    app = FastAPI(title="veriswarm coordinator", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(coordinator)
    newcomers = AddressLimiter(per_minute=registrations_per_minute)
    _handle_errors(app)
    _count_requests(app, metrics)
    _public_routes(app, coordinator, metrics)
    _log_routes(app, coordinator)
    _node_routes(app, coordinator, newcomers)
    _submission_routes(app, coordinator)
    return app


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """A whole small body; raises Refusal past `max_bytes` or the deadline."""
    pieces, size = [], 0
    try:
        async with asyncio.timeout(BODY_DEADLINE_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size > max_bytes:
                    raise Refusal(Reason.OVERSIZED_BODY, f"More than {max_bytes} bytes.")
                pieces.append(piece)
    except TimeoutError as error:
        raise Refusal(Reason.BAD_REQUEST, "The body did not arrive in time.") from error
    return b"".join(pieces)


async def signed_message(request: Request, coordinator: Coordinator, cls: type[T]) -> tuple[str, T]:
    """The signer and the message of a signed request; raises Refusal."""
    body = await read_body(request, max_bytes=MAX_MESSAGE_BYTES)
    envelope = read_authorization(request.headers.get("authorization", ""))
    node, claim = await _authenticate(request, coordinator, envelope)
    _check_body(claim, digest(body), len(body))
    try:
        return node, decode(cls, body, max_bytes=MAX_MESSAGE_BYTES)
    except PeerFault as error:
        raise Refusal(Reason.BAD_REQUEST, f"{error}.") from error


async def _authenticate(request: Request, coordinator: Coordinator, envelope: bytes) -> tuple[str, RequestClaim]:
    return await run_in_threadpool(
        coordinator.authenticate, envelope, method=request.method, path=request.scope["path"], now=time.time()
    )


def _check_body(claim: RequestClaim, body_digest: str, body_bytes: int) -> None:
    if claim.body_digest != body_digest or claim.body_bytes != body_bytes:
        raise Refusal(Reason.BODY_MISMATCH, f"{body_bytes} bytes arrived, {claim.body_bytes} were signed.")


def _refuse(refusal: Refusal) -> Response:
    reply = ErrorReply(
        code=refusal.reason.value,
        message=str(refusal),
        server_time=int(time.time()),
        submission=refusal.submission,
    )
    headers = {"Retry-After": "5"} if refusal.reason is Reason.TOO_MANY_REQUESTS else {}
    # A body that was refused unread must not be taken for the next request.
    headers["Connection"] = "close"
    return Response(encode(reply), status_code=_STATUS[refusal.reason], media_type=_JSON, headers=headers)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def _refused(_request: Request, refusal: Refusal) -> Response:
        return _refuse(refusal)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def _unknown(request: Request, _error: Exception) -> Response:
        return _refuse(Refusal(Reason.NOT_FOUND, f"Nothing at {request.method[:10]} {request.scope['path'][:100]!r}."))

    @app.exception_handler(ClientDisconnect)
    async def _gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=400)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, _error: Exception) -> Response:
        return _refuse(Refusal(Reason.BAD_REQUEST, "A parameter is missing or is not what it must be."))


def _count_requests(app: FastAPI, metrics: Metrics) -> None:
    @app.middleware("http")
    async def _count(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        started = time.perf_counter()
        response = await go_on(request)
        route = request.scope.get("route")
        path = getattr(route, "path", "other")
        method = request.method if request.method in _METHODS else "other"
        metrics.request_seconds.labels(method, path, response.status_code).observe(time.perf_counter() - started)
        return response


def _public_routes(app: FastAPI, coordinator: Coordinator, metrics: Metrics) -> None:
    @app.get("/health")
    def health() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    @app.get("/metrics")
    def prometheus() -> Response:
        return Response(metrics.render(), media_type=metrics.content_type)

    @app.get("/v1/run")
    def run() -> Response:
        return Response(coordinator.descriptor(now=time.time()), media_type=_BYTES)

    @app.get("/v1/policy")
    def policy() -> Response:
        return Response(coordinator.newest_policy(), media_type=_BYTES)

    @app.get("/v1/relays")
    def relays(request: Request, node: str | None = None) -> Response:
        if node is not None and not is_digest(node):
            raise Refusal(Reason.BAD_REQUEST, "node must be a public key in hexadecimal.")
        address = request.client.host if request.client else ""
        return Response(encode(coordinator.relays.advice(node, address=address, now=time.time())), media_type=_JSON)

    @app.get("/v1/status")
    def status() -> JSONResponse:
        return JSONResponse(run_status(coordinator, now=time.time()))

    @app.get("/v1/blobs/{name}")
    def blob(name: str) -> Response:
        try:
            path = coordinator.home.blobs.path(name)
        except StorageFault as error:
            raise Refusal(Reason.NOT_FOUND, "Not a blob's name.") from error
        if not path.exists():
            raise Refusal(Reason.NOT_FOUND, "No such blob.")
        return FileResponse(path, media_type=_BYTES)


def _log_routes(app: FastAPI, coordinator: Coordinator) -> None:
    @app.get("/v1/log/checkpoint")
    def checkpoint() -> Response:
        return Response(coordinator.checkpoint(now=time.time()), media_type=_BYTES)

    @app.get("/v1/log/entries")
    def entries(start: Annotated[int, Query(ge=0, le=2**53)], end: Annotated[int, Query(ge=0, le=2**53)]) -> Response:
        leaves = coordinator.entries(start, min(end, start + MAX_ENTRIES_PER_READ))
        return Response(b"".join(leaf + b"\n" for leaf in leaves), media_type="application/x-ndjson")

    @app.get("/v1/log/inclusion")
    def inclusion(
        index: Annotated[int, Query(ge=0, le=2**53)], size: Annotated[int, Query(ge=0, le=2**53)]
    ) -> JSONResponse:
        return JSONResponse({"hashes": [h.hex() for h in coordinator.inclusion(index, size)]})

    @app.get("/v1/log/consistency")
    def consistency(
        first: Annotated[int, Query(ge=0, le=2**53)], second: Annotated[int, Query(ge=0, le=2**53)]
    ) -> JSONResponse:
        return JSONResponse({"hashes": [h.hex() for h in coordinator.consistency(first, second)]})


def _node_routes(app: FastAPI, coordinator: Coordinator, newcomers: AddressLimiter) -> None:
    def limited(request: Request) -> None:
        newcomers.check(request.client.host if request.client else "unknown", now=time.monotonic())

    @app.post("/v1/nodes", dependencies=[Depends(limited)])
    async def register(request: Request) -> JSONResponse:
        node, message = await signed_message(request, coordinator, Registration)
        await run_in_threadpool(coordinator.register, node, message, now=time.time())
        return JSONResponse({})

    @app.post("/v1/relays", dependencies=[Depends(limited)])
    async def announce(request: Request) -> Response:
        node, message = await signed_message(request, coordinator, RelayAnnouncement)
        address = request.client.host if request.client else ""
        now = time.time()
        await run_in_threadpool(coordinator.relays.announce, node, message, address=address, now=now)
        advice = await run_in_threadpool(coordinator.relays.advice, node, address=address, now=now)
        return Response(encode(advice), media_type=_JSON)

    @app.post("/v1/leases")
    async def lease(request: Request) -> Response:
        node, message = await signed_message(request, coordinator, LeaseRequest)
        reply = await run_in_threadpool(coordinator.lease, node, message, now=time.time())
        return Response(encode(reply), media_type=_JSON)

    @app.post("/v1/leases/{lease_id}/return")
    async def give_back(request: Request, lease_id: str) -> JSONResponse:
        body = await read_body(request, max_bytes=0)
        envelope = read_authorization(request.headers.get("authorization", ""))
        node, claim = await _authenticate(request, coordinator, envelope)
        _check_body(claim, digest(body), len(body))
        await run_in_threadpool(coordinator.give_back, node, lease_id, now=time.time())
        return JSONResponse({})


def _submission_routes(app: FastAPI, coordinator: Coordinator) -> None:
    watch = LogWatch(coordinator.log_size)
    uploading: set[str] = set()

    @app.put("/v1/submissions/{lease_id}")
    async def submit(request: Request, lease_id: str) -> Response:
        envelope = read_authorization(request.headers.get("authorization", ""))
        _, claimed = open_claim(envelope)
        limit = coordinator.home.spec.limits.max_submission_bytes
        if claimed.body_bytes > limit:
            raise Refusal(Reason.OVERSIZED_BODY, f"{claimed.body_bytes} bytes, at most {limit} are taken.")
        node, claim = await _authenticate(request, coordinator, envelope)
        await run_in_threadpool(coordinator.may_submit, node, lease_id, now=time.time())
        if lease_id in uploading:
            raise Refusal(Reason.TOO_MANY_REQUESTS, "This lease is being submitted by another request.")
        uploading.add(lease_id)
        try:
            submission = await _receive(request, coordinator, node, lease_id, envelope=envelope, claim=claim)
        finally:
            uploading.discard(lease_id)
        return Response(encode(SubmissionReply(submission=submission)), status_code=202, media_type=_JSON)

    @app.get("/v1/receipts/{submission}")
    async def receipt(
        submission: str, wait: Annotated[float, Query(ge=0, le=RECEIPT_WAIT_MAX_SECONDS)] = 0.0
    ) -> Response:
        if not is_digest(submission):
            raise Refusal(Reason.NOT_FOUND, "Not a submission's id.")
        deadline = time.monotonic() + wait
        while True:
            ticket = watch.ticket()
            found = await run_in_threadpool(coordinator.receipt, submission)
            if isinstance(found, bytes):
                return Response(found, media_type=_BYTES)
            if time.monotonic() >= deadline:
                return JSONResponse({"state": found}, status_code=202)
            await watch.wait(ticket, seconds=deadline - time.monotonic())


async def _receive(
    request: Request, coordinator: Coordinator, node: str, lease_id: str, *, envelope: bytes, claim: RequestClaim
) -> str:
    """Take an upload as it arrives, and keep it if it is what was signed and the lease still holds."""
    with coordinator.home.blobs.incoming(max_bytes=claim.body_bytes) as incoming:
        try:
            async with asyncio.timeout(UPLOAD_DEADLINE_SECONDS):
                async for piece in request.stream():
                    incoming.write(piece)
        except TimeoutError as error:
            raise Refusal(Reason.BAD_REQUEST, "The body did not arrive in time.") from error
        _check_body(claim, incoming.digest, incoming.size_bytes)
        return await run_in_threadpool(coordinator.submit, node, lease_id, envelope, incoming, now=time.time())
