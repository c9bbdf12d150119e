"""The coordinator's HTTP service (docs/protocol.md, section 3).

Bodies are read with a byte limit and a deadline before anything parses them. Every refusal is an ErrorReply
with a stable code; anything unforeseen is a 500 that says nothing about the inside.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from sqlalchemy.exc import OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from coordinator.door import Door, address_of
from coordinator.errors import StorageFault
from coordinator.limits import AddressLimiter, RateLimiter, network_of
from coordinator.log_watch import LogWatch
from coordinator.metrics import Metrics
from coordinator.openapi import document
from coordinator.refusals import apologise, is_away, out_of_service, refuse
from coordinator.service import Coordinator
from coordinator.status import run_status
from coordinator.storage.log import MAX_ENTRIES_PER_READ
from node.protocol.messages import (
    MAX_MESSAGE_BYTES,
    LeaseRequest,
    Registration,
    RelayAnnouncement,
    RequestClaim,
    SubmissionReply,
)
from node.protocol.reasons import Reason, Refusal
from node.protocol.requests import open_claim, read_authorization
from shardcast.errors import PeerFault
from shardcast.wire import MAX_INTEGER, decode, digest, encode, is_digest

BODY_DEADLINE_SECONDS = 30.0
UPLOAD_DEADLINE_SECONDS = 120.0
RECEIPT_WAIT_MAX_SECONDS = 30.0
STATUS_SECONDS = 1.0
"""How old may be what people and Prometheus see: asking for it costs more than anything else, and anybody may."""

SAY_SECONDS = 10.0
"""How often the log hears of a disk that is full, whoever asks meanwhile."""

log = logging.getLogger(__name__)
_BYTES = "application/octet-stream"
_JSON = "application/json"
_Index = Annotated[int, Query(ge=0, le=MAX_INTEGER)]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """How many requests a minute: all of one address, signed ones of one node, new nodes and relays of one address."""

    per_address: int = 6000
    per_node: int = 1200
    registrations: int = 120


DEFAULT_REQUEST_LIMITS = RequestLimits()


@dataclass(frozen=True, slots=True)
class _Service:
    """What the handlers share."""

    coordinator: Coordinator
    nodes: RateLimiter
    newcomers: AddressLimiter


def create_app(coordinator: Coordinator, *, limits: RequestLimits = DEFAULT_REQUEST_LIMITS) -> FastAPI:
    """The service of one run."""
    app = FastAPI(title="veriswarm coordinator", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(coordinator)
    service = _Service(
        coordinator,
        nodes=RateLimiter(per_minute=limits.per_node, who="node"),
        newcomers=AddressLimiter(per_minute=limits.registrations),
    )
    _handle_errors(app)
    app.add_middleware(Door, metrics=metrics, addresses=AddressLimiter(per_minute=limits.per_address))
    _public_routes(app, coordinator, metrics)
    _log_routes(app, coordinator)
    _node_routes(app, service)
    _submission_routes(app, service)
    _describe(app)
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


async def signed_message(request: Request, service: _Service, cls: type[T]) -> tuple[str, T]:
    """The signer and the message of a signed request; raises Refusal."""
    body = await read_body(request, max_bytes=MAX_MESSAGE_BYTES)
    envelope = read_authorization(request.headers.get("authorization", ""))
    node, claim = await run_in_threadpool(_authenticate, request, service, envelope)
    _check_body(claim, digest(body), len(body))
    try:
        return node, decode(cls, body, max_bytes=MAX_MESSAGE_BYTES)
    except PeerFault as error:
        raise Refusal(Reason.BAD_REQUEST, f"{error}.") from error


def _authenticate(request: Request, service: _Service, envelope: bytes) -> tuple[str, RequestClaim]:
    """Who signed, and what; it counts as one of the node's requests, unless somebody else repeats it."""
    signer, _ = open_claim(envelope)
    service.nodes.peek(signer.hex(), now=time.monotonic())
    node, claim = service.coordinator.authenticate(
        envelope, method=request.method, path=request.scope["path"], now=time.time()
    )
    service.nodes.check(node, now=time.monotonic())
    return node, claim


def _check_body(claim: RequestClaim, body_digest: str, body_bytes: int) -> None:
    if claim.body_digest != body_digest or claim.body_bytes != body_bytes:
        raise Refusal(Reason.BODY_MISMATCH, f"{body_bytes} bytes arrived, {claim.body_bytes} were signed.")


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def _refused(_request: Request, refusal: Refusal) -> Response:
        return refuse(refusal)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def _unknown(request: Request, _error: Exception) -> Response:
        return refuse(Refusal(Reason.NOT_FOUND, f"Nothing at {request.method[:10]} {request.scope['path'][:100]!r}."))

    @app.exception_handler(ClientDisconnect)
    async def _gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=400)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, _error: Exception) -> Response:
        return refuse(Refusal(Reason.BAD_REQUEST, "A parameter is missing or is not what it must be."))

    said = -math.inf

    @app.exception_handler(OSError)
    @app.exception_handler(OperationalError)
    async def _away(_request: Request, error: Exception) -> Response:
        nonlocal said
        if not is_away(error):
            raise error
        if time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            log.error("the disk or the database is away: %s", error)
        return out_of_service()

    @app.exception_handler(Exception)
    async def _unforeseen(_request: Request, _error: Exception) -> Response:
        # Starlette raises it again once this is sent, and uvicorn logs it.
        return apologise()


def _describe(app: FastAPI) -> None:
    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> Response:
        return Response(described, media_type=_JSON)

    described = document(app)


class _Remembered:
    """An answer that is made anew once it is STATUS_SECONDS old, by one thread for all who ask meanwhile."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: tuple[float, bytes] | None = None

    def get(self) -> bytes:
        with self._lock:
            if self._made is None or time.monotonic() - self._made[0] >= STATUS_SECONDS:
                self._made = (time.monotonic(), self._make())
            return self._made[1]


def _public_routes(app: FastAPI, coordinator: Coordinator, metrics: Metrics) -> None:
    @app.get("/health")
    def health() -> PlainTextResponse:
        return PlainTextResponse("ok\n")

    figures = _Remembered(metrics.render)
    status_now = _Remembered(lambda: json.dumps(run_status(coordinator, now=time.time())).encode())

    @app.get("/metrics")
    def prometheus() -> Response:
        return Response(figures.get(), media_type=metrics.content_type)

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
        advice = coordinator.relays.advice(node, address=address_of(request.scope), now=time.time())
        return Response(encode(advice), media_type=_JSON)

    @app.get("/v1/status")
    def status() -> Response:
        return Response(status_now.get(), media_type=_JSON)

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
    def entries(start: _Index, end: _Index) -> Response:
        leaves = coordinator.entries(start, min(end, start + MAX_ENTRIES_PER_READ))
        return Response(b"".join(leaf + b"\n" for leaf in leaves), media_type="application/x-ndjson")

    @app.get("/v1/log/inclusion")
    def inclusion(index: _Index, size: _Index) -> JSONResponse:
        return JSONResponse({"hashes": [h.hex() for h in coordinator.inclusion(index, size)]})

    @app.get("/v1/log/consistency")
    def consistency(first: _Index, second: _Index) -> JSONResponse:
        return JSONResponse({"hashes": [h.hex() for h in coordinator.consistency(first, second)]})


def _node_routes(app: FastAPI, service: _Service) -> None:
    coordinator = service.coordinator

    def limited(request: Request) -> None:
        service.newcomers.check(address_of(request.scope), now=time.monotonic())

    @app.post("/v1/nodes", dependencies=[Depends(limited)])
    async def register(request: Request) -> JSONResponse:
        node, message = await signed_message(request, service, Registration)
        await run_in_threadpool(coordinator.register, node, message, now=time.time())
        return JSONResponse({})

    @app.post("/v1/relays", dependencies=[Depends(limited)])
    async def announce(request: Request) -> Response:
        node, message = await signed_message(request, service, RelayAnnouncement)
        address = address_of(request.scope)
        now = time.time()
        await run_in_threadpool(coordinator.relays.announce, node, message, address=address, now=now)
        advice = await run_in_threadpool(coordinator.relays.advice, node, address=address, now=now)
        return Response(encode(advice), media_type=_JSON)

    @app.post("/v1/leases")
    async def lease(request: Request) -> Response:
        node, message = await signed_message(request, service, LeaseRequest)
        address = network_of(address_of(request.scope))
        reply = await run_in_threadpool(coordinator.lease, node, message, now=time.time(), address=address)
        return Response(encode(reply), media_type=_JSON)

    @app.post("/v1/leases/{lease_id}/return")
    async def give_back(request: Request, lease_id: str) -> JSONResponse:
        body = await read_body(request, max_bytes=0)
        envelope = read_authorization(request.headers.get("authorization", ""))
        node, claim = await run_in_threadpool(_authenticate, request, service, envelope)
        _check_body(claim, digest(body), len(body))
        await run_in_threadpool(coordinator.give_back, node, lease_id, now=time.time())
        return JSONResponse({})


def _submission_routes(app: FastAPI, service: _Service) -> None:
    coordinator = service.coordinator
    watch = LogWatch(coordinator.log_size, coordinator.entries)
    uploading: set[str] = set()

    @app.put("/v1/submissions/{lease_id}")
    async def submit(request: Request, lease_id: str) -> Response:
        envelope = read_authorization(request.headers.get("authorization", ""))
        node, claim = await run_in_threadpool(_announced, request, service, envelope, lease_id)
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
        request: Request,
        submission: str,
        wait: Annotated[float, Query(ge=0, le=RECEIPT_WAIT_MAX_SECONDS, allow_inf_nan=False)] = 0.0,
    ) -> Response:
        if not is_digest(submission):
            raise Refusal(Reason.NOT_FOUND, "Not a submission's id.")
        found = await run_in_threadpool(coordinator.receipt, submission)
        if wait and not isinstance(found, bytes):
            async with watch.ticket(submission) as decided:
                found = await run_in_threadpool(coordinator.receipt, submission)
                if not isinstance(found, bytes):
                    await _wait(request, decided, seconds=wait)
                    found = await run_in_threadpool(coordinator.receipt, submission)
        if isinstance(found, bytes):
            return Response(found, media_type=_BYTES)
        return JSONResponse({"state": found}, status_code=202)


def _announced(request: Request, service: _Service, envelope: bytes, lease_id: str) -> tuple[str, RequestClaim]:
    """Who wants to submit what; refused, if it is to be, before a byte of the body is read."""
    coordinator = service.coordinator
    _, claimed = open_claim(envelope)
    limit = coordinator.home.spec.limits.max_submission_bytes
    if claimed.body_bytes > limit:
        raise Refusal(Reason.OVERSIZED_BODY, f"{claimed.body_bytes} bytes, at most {limit} are taken.")
    node, claim = _authenticate(request, service, envelope)
    coordinator.may_submit(node, lease_id, now=time.time())
    return node, claim


async def _wait(request: Request, event: asyncio.Event, *, seconds: float) -> None:
    """For `event`, at most for so long, and not for a client that has gone: it would cost nothing to leave many."""

    async def leaving() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = {asyncio.create_task(event.wait()), asyncio.create_task(leaving())}
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


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
