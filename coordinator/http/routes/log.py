"""The transparency log and its evidence; unauthenticated."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from starlette.concurrency import run_in_threadpool

from coordinator.http.routing import ServiceDep, respond, respond_bytes, route
from coordinator.storage.log import MAX_ENTRIES_PER_READ
from node.protocol import endpoints
from node.protocol.endpoints import LogProof
from node.protocol.reasons import Reason, Refusal
from shardcast.wire import MAX_INTEGER

router = APIRouter()

_Index = Annotated[int, Query(ge=0, le=MAX_INTEGER)]


@route(router, endpoints.BLOB)
async def blob(service: ServiceDep, name: str) -> Response:
    if (request := await run_in_threadpool(service.coordinator.signed_request, name)) is not None:
        return respond_bytes(endpoints.BLOB, request)
    try:
        return await service.intake.evidence(name)
    except Refusal as refusal:
        if refusal.reason is Reason.NOT_FOUND and await run_in_threadpool(service.coordinator.has_expired, name):
            raise Refusal(Reason.EVIDENCE_EXPIRED, f"Blob {name[:16]}….") from refusal
        raise


@route(router, endpoints.LOG_CHECKPOINT)
def checkpoint(service: ServiceDep) -> Response:
    return respond_bytes(endpoints.LOG_CHECKPOINT, service.coordinator.checkpoint())


@route(router, endpoints.LOG_WITNESSED)
async def witnessed(service: ServiceDep) -> Response:
    return respond_bytes(endpoints.LOG_WITNESSED, service.coordinator.witnessed())


@route(router, endpoints.LOG_ENTRIES)
def entries(service: ServiceDep, start: _Index, end: _Index) -> Response:
    leaves = service.coordinator.entries(start, min(end, start + MAX_ENTRIES_PER_READ))
    return respond_bytes(endpoints.LOG_ENTRIES, b"".join(leaf + b"\n" for leaf in leaves))


@route(router, endpoints.LOG_INCLUSION)
def inclusion(service: ServiceDep, index: _Index, size: _Index) -> Response:
    return respond(endpoints.LOG_INCLUSION, _proof(service.coordinator.inclusion(index, size)))


@route(router, endpoints.LOG_CONSISTENCY)
def consistency(service: ServiceDep, first: _Index, second: _Index) -> Response:
    return respond(endpoints.LOG_CONSISTENCY, _proof(service.coordinator.consistency(first, second)))


def _proof(hashes: list[bytes]) -> LogProof:
    return LogProof(hashes=tuple(each.hex() for each in hashes))
