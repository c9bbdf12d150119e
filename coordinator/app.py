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
from typing import Annotated

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from coordinator.dashboard.routes import add_dashboard
from coordinator.descriptor_watch import DescriptorWatch
from coordinator.door import Door, address_of
from coordinator.ending import Ending
from coordinator.limits import AddressLimiter, RateLimiter, network_of
from coordinator.log_watch import LogWatch
from coordinator.metrics import Metrics
from coordinator.openapi import document
from coordinator.receiving import Receiving
from coordinator.refusals import apologise, is_away, out_of_service, refuse
from coordinator.service import Coordinator
from coordinator.signed import SignedRequests, open_request, read_envelope, read_message
from coordinator.status import run_status
from coordinator.storage.log import MAX_ENTRIES_PER_READ
from node.logs import bound
from node.protocol.messages import (
    LeaseReply,
    LeaseRequest,
    Registration,
    RelayAnnouncement,
    RequestClaim,
    SubmissionReply,
)
from node.protocol.reasons import Reason, Refusal
from shardcast.wire import MAX_INTEGER, encode, is_digest

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
    signed: SignedRequests
    newcomers: AddressLimiter
    receiving: Receiving
    metrics: Metrics


def create_app(coordinator: Coordinator, *, limits: RequestLimits = DEFAULT_REQUEST_LIMITS) -> FastAPI:
    """The service of one run."""
    app = FastAPI(title="veriswarm coordinator", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics(coordinator, crowd=lambda: getattr(app.state, "crowd", None))
    signed = SignedRequests(coordinator, limiter=RateLimiter(per_minute=limits.per_node, who="node"))
    service = _Service(
        coordinator,
        signed=signed,
        newcomers=AddressLimiter(per_minute=limits.registrations),
        receiving=Receiving(coordinator, signed),
        metrics=metrics,
    )
    app.state.metrics = metrics
    app.state.ending = Ending()
    _handle_errors(app, metrics)
    app.add_middleware(Door, metrics=metrics, addresses=AddressLimiter(per_minute=limits.per_address))
    _public_routes(app, coordinator, metrics)
    _log_routes(app, service)
    _node_routes(app, service)
    _submission_routes(app, service)
    add_dashboard(app, coordinator)
    _describe(app)
    return app


def _handle_errors(app: FastAPI, metrics: Metrics) -> None:
    @app.exception_handler(Refusal)
    async def _refused(_request: Request, refusal: Refusal) -> Response:
        metrics.refused(refusal.reason)
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

    descriptors = DescriptorWatch(coordinator.descriptors, app.state.ending)

    @app.get("/v1/run")
    async def run(
        request: Request,
        after: _Index | None = None,
        wait: Annotated[float, Query(ge=0, le=RECEIPT_WAIT_MAX_SECONDS, allow_inf_nan=False)] = 0.0,
    ) -> Response:
        address = network_of(address_of(request.scope))
        issued = await descriptors.newest(after=after, wait_seconds=wait, address=address)
        return Response(issued.envelope, media_type=_BYTES)

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


def _log_routes(app: FastAPI, service: _Service) -> None:
    coordinator = service.coordinator

    @app.get("/v1/blobs/{name}")
    async def blob(name: str) -> Response:
        return await service.receiving.evidence(name)

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

    async def limited(request: Request) -> None:
        service.newcomers.check(address_of(request.scope), now=time.monotonic())

    @app.post("/v1/nodes", dependencies=[Depends(limited)])
    async def register(request: Request) -> JSONResponse:
        def act(connection: Connection, node: str, body: bytes) -> None:
            coordinator.register(connection, node, read_message(Registration, body), now=time.time())

        await service.signed.do(request, act)
        return JSONResponse({})

    @app.get("/v1/nodes/{node}")
    def standing(node: str) -> Response:
        if not is_digest(node):
            raise Refusal(Reason.NOT_FOUND, "Not a node's id.")
        return Response(encode(coordinator.standing(node, now=time.time())), media_type=_JSON)

    @app.post("/v1/relays", dependencies=[Depends(limited)])
    async def announce(request: Request) -> Response:
        def act(_connection: Connection, node: str, body: bytes) -> tuple[str, RelayAnnouncement]:
            return node, read_message(RelayAnnouncement, body)

        node, message = await service.signed.do(request, act)
        address = address_of(request.scope)
        now = time.time()
        await run_in_threadpool(coordinator.relays.announce, node, message, address=address, now=now)
        advice = await run_in_threadpool(coordinator.relays.advice, node, address=address, now=now)
        return Response(encode(advice), media_type=_JSON)

    @app.post("/v1/leases")
    async def lease(request: Request) -> Response:
        address = network_of(address_of(request.scope))

        def act(connection: Connection, node: str, body: bytes) -> LeaseReply:
            asked = read_message(LeaseRequest, body)
            return coordinator.lease(connection, node, asked, now=time.time(), address=address)

        reply = await service.signed.do(request, act)
        service.metrics.leases_issued.inc(len(reply.leases))
        return Response(encode(reply), media_type=_JSON)

    @app.post("/v1/leases/{lease_id}/return")
    async def give_back(request: Request, lease_id: str) -> JSONResponse:
        def act(connection: Connection, node: str, _body: bytes) -> None:
            coordinator.give_back(connection, node, lease_id, now=time.time())

        await service.signed.do(request, act, max_bytes=0)
        return JSONResponse({})


def _submission_routes(app: FastAPI, service: _Service) -> None:
    coordinator = service.coordinator
    watch = LogWatch(coordinator.log_size, coordinator.entries)

    def acknowledged(submission: str, *, node: str, lease: str) -> Response:
        service.metrics.submissions.inc()
        with bound(submission=submission, node=node, lease=lease):
            log.info("submission %s… of %s… is queued", submission[:16], node[:8])
        return Response(encode(SubmissionReply(submission=submission)), status_code=202, media_type=_JSON)

    @app.put("/v1/submissions/{lease_id}")
    async def submit(request: Request, lease_id: str) -> Response:
        envelope = read_envelope(request)
        node, claim = await run_in_threadpool(_announced, request, service, envelope, lease_id)
        taken = await service.receiving.body(request, node, lease_id, envelope=envelope, claim=claim)
        return acknowledged(taken, node=node, lease=lease_id)

    @app.post("/v1/uploads/{lease_id}")
    async def announce(request: Request, lease_id: str) -> Response:
        reply = await service.receiving.announcement(request, lease_id)
        return Response(encode(reply), media_type=_JSON, headers={"Cache-Control": "no-store"})

    @app.put("/v1/submissions/{lease_id}/{sha256}")
    async def submit_upload(request: Request, lease_id: str, sha256: str) -> Response:
        envelope = read_envelope(request)
        node, claim = await run_in_threadpool(_announced, request, service, envelope, lease_id)
        taken = await service.receiving.upload(node, lease_id, sha256, envelope=envelope, claim=claim)
        return acknowledged(taken, node=node, lease=lease_id)

    @app.get("/v1/receipts/{submission}")
    async def receipt(
        request: Request,
        submission: str,
        wait: Annotated[float, Query(ge=0, le=RECEIPT_WAIT_MAX_SECONDS, allow_inf_nan=False)] = 0.0,
    ) -> Response:
        if not is_digest(submission):
            raise Refusal(Reason.NOT_FOUND, "Not a submission's id.")
        if not wait:
            found = await run_in_threadpool(coordinator.receipt, submission)
        else:
            async with watch.ticket(submission) as decided:
                found = await run_in_threadpool(coordinator.receipt, submission)
                if not isinstance(found, bytes):
                    await _wait(request, decided, app.state.ending, seconds=wait)
                    found = await run_in_threadpool(coordinator.receipt, submission)
        if isinstance(found, bytes):
            return Response(found, media_type=_BYTES)
        return JSONResponse({"state": found}, status_code=202)


def _announced(request: Request, service: _Service, envelope: bytes, lease_id: str) -> tuple[str, RequestClaim]:
    """Who wants to submit what; refused, if it is to be, before a byte of the body is read."""
    coordinator = service.coordinator
    node, claim = open_request(envelope)
    limit = coordinator.home.spec.limits.max_submission_bytes
    if claim.body_bytes > limit:
        raise Refusal(Reason.OVERSIZED_BODY, f"{claim.body_bytes} bytes, at most {limit} are taken.")
    with service.signed.accept(request, node, claim) as connection:
        coordinator.may_submit(connection, node, lease_id, now=time.time())
    return node, claim


async def _wait(request: Request, event: asyncio.Event, ending: Ending, *, seconds: float) -> None:
    """For `event`, at most for so long, and not for a client that has gone: it would cost nothing to leave many."""

    async def leaving() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = {asyncio.create_task(ending.before(event)), asyncio.create_task(leaving())}
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
