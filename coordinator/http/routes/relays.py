"""Relays: announcements, and the sources that a node should fetch from."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from coordinator.http.middleware import address_of
from coordinator.http.routing import ServiceDep, limit_registrations, plain_route, read_signed, respond, route
from node.protocol import endpoints

_PUBLIC_KEY = "^[0-9a-f]{64}$"

router = APIRouter()


@route(router, endpoints.RELAYS)
def relays(
    request: Request, service: ServiceDep, node: Annotated[str | None, Query(pattern=_PUBLIC_KEY)] = None
) -> Response:
    advice = service.coordinator.relays.advice(node, address=address_of(request.scope), now=time.time())
    return respond(endpoints.RELAYS, advice)


@plain_route(router, endpoints.ANNOUNCE_RELAY)
async def announce(request: Request) -> Response:
    limit_registrations(request)
    call = await read_signed(endpoints.ANNOUNCE_RELAY, request)
    node, announcement = await call.execute(lambda _transaction, node, announcement: (node, announcement))
    registry, now = call.service.coordinator.relays, time.time()
    await run_in_threadpool(registry.announce, node, announcement, address=call.address, now=now)
    advice = await run_in_threadpool(registry.advice, node, address=call.address, now=now)
    return respond(endpoints.ANNOUNCE_RELAY, advice)
