"""Nodes: registration and standing."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, Response

from coordinator.http.routing import Shared, SignedCall, answer, newcomer, route, signed
from node.protocol import endpoints
from node.protocol.endpoints import Empty
from node.protocol.messages import Registration
from node.protocol.reasons import Reason, Refusal
from shardcast.wire import is_digest

router = APIRouter()


@route(router, endpoints.REGISTER, dependencies=[Depends(newcomer)])
async def register(call: Annotated[SignedCall[Registration], Depends(signed(endpoints.REGISTER))]) -> Response:
    coordinator = call.service.coordinator
    await call.do(lambda transaction, node, message: coordinator.register(transaction, node, message, now=time.time()))
    return answer(endpoints.REGISTER, Empty())


@route(router, endpoints.STANDING)
def standing(service: Shared, node: str) -> Response:
    if not is_digest(node):
        raise Refusal(Reason.NOT_FOUND, "Not a node's id.")
    return answer(endpoints.STANDING, service.coordinator.standing(node, now=time.time()))
