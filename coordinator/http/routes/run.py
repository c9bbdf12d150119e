"""The run: its descriptor, newest policy and status, and this process's health and metrics."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from coordinator.http.middleware import address_of
from coordinator.http.routing import ServiceDep, respond_bytes, route
from node.protocol import endpoints
from shardcast.rate_limit import network_of
from shardcast.wire import MAX_INTEGER

router = APIRouter()


@route(router, endpoints.HEALTH)
def health() -> Response:
    return respond_bytes(endpoints.HEALTH, b"ok\n")


@route(router, endpoints.METRICS)
def prometheus(service: ServiceDep) -> Response:
    return Response(service.figures.get(), media_type=service.metrics.content_type)


@route(router, endpoints.RUN)
async def run(
    request: Request,
    service: ServiceDep,
    after: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
    wait: Annotated[float, Query(ge=0, le=endpoints.MAX_WAIT_SECONDS, allow_inf_nan=False)] = 0.0,
) -> Response:
    network = network_of(address_of(request.scope))
    issued = await service.descriptors.newest(after=after, wait_seconds=wait, address=network)
    return respond_bytes(endpoints.RUN, issued.envelope)


@route(router, endpoints.POLICY)
def policy(service: ServiceDep) -> Response:
    return respond_bytes(endpoints.POLICY, service.coordinator.newest_policy())


@route(router, endpoints.STATUS_OF_RUN)
def status(service: ServiceDep) -> Response:
    return respond_bytes(endpoints.STATUS_OF_RUN, service.status.get())
