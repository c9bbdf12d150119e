"""Nodes: registration, the puzzle that it may need, and standing."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from coordinator.http.routing import ServiceDep, limit_registrations, plain_route, read_signed, respond, route
from node.protocol import endpoints
from node.protocol.endpoints import Empty
from node.protocol.reasons import Reason, Refusal
from shardcast.wire import is_digest

router = APIRouter()


@plain_route(router, endpoints.REGISTER)
async def register(request: Request) -> Response:
    limit_registrations(request)
    call = await read_signed(endpoints.REGISTER, request)
    coordinator = call.service.coordinator
    await call.execute(
        lambda transaction, node, message: coordinator.register(transaction, node, message, now=time.time())
    )
    return respond(endpoints.REGISTER, Empty())


@route(router, endpoints.PUZZLE)
def puzzle(service: ServiceDep) -> Response:
    return Response(service.puzzle.get(), media_type=endpoints.JSON)


@route(router, endpoints.STANDING)
def standing(service: ServiceDep, node: str) -> Response:
    if not is_digest(node):
        raise Refusal(Reason.NOT_FOUND, "Not a node's id.")
    return respond(endpoints.STANDING, service.coordinator.standing(node, now=time.time()))
