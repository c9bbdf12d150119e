"""Leases: requesting and returning them."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from coordinator.http.routing import plain_route, read_signed, respond
from coordinator.storage.database import Connection
from node.protocol import endpoints
from node.protocol.endpoints import Empty
from node.protocol.messages import LeaseReply, LeaseRequest

router = APIRouter()


@plain_route(router, endpoints.LEASE)
async def lease(request: Request) -> Response:
    call = await read_signed(endpoints.LEASE, request)
    coordinator, network = call.service.coordinator, call.network

    def act(transaction: Connection, node: str, message: LeaseRequest) -> LeaseReply:
        return coordinator.lease(transaction, node, message, now=time.time(), address=network)

    reply = await call.execute(act)
    call.service.metrics.leases_issued.inc(len(reply.leases))
    return respond(endpoints.LEASE, reply)


@plain_route(router, endpoints.RETURN_LEASE)
async def give_back(request: Request) -> Response:
    call = await read_signed(endpoints.RETURN_LEASE, request)
    coordinator, lease_id = call.service.coordinator, request.path_params["lease_id"]
    await call.execute(
        lambda transaction, node, _: coordinator.return_lease(transaction, node, lease_id, now=time.time())
    )
    return respond(endpoints.RETURN_LEASE, Empty())
