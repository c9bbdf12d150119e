"""Leases: requesting and returning them."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Response

from coordinator.http.routing import SignedCall, respond, route, signed
from coordinator.storage.database import Connection
from node.protocol import endpoints
from node.protocol.endpoints import Empty
from node.protocol.messages import LeaseReply, LeaseRequest

router = APIRouter()


@route(router, endpoints.LEASE)
async def lease(call: Annotated[SignedCall[LeaseRequest], Depends(signed(endpoints.LEASE))]) -> Response:
    coordinator, network = call.service.coordinator, call.network

    def act(transaction: Connection, node: str, request: LeaseRequest) -> LeaseReply:
        return coordinator.lease(transaction, node, request, now=time.time(), address=network)

    reply = await call.execute(act)
    call.service.metrics.leases_issued.inc(len(reply.leases))
    return respond(endpoints.LEASE, reply)


@route(router, endpoints.RETURN_LEASE)
async def give_back(
    call: Annotated[SignedCall[None], Depends(signed(endpoints.RETURN_LEASE))], lease_id: str
) -> Response:
    coordinator = call.service.coordinator
    await call.execute(
        lambda transaction, node, _: coordinator.return_lease(transaction, node, lease_id, now=time.time())
    )
    return respond(endpoints.RETURN_LEASE, Empty())
