"""The coordinator's HTTP endpoints, one router for each resource (`node.protocol.endpoints` declares them)."""

from fastapi import APIRouter

from coordinator.http.routes import leases, log, nodes, relays, run, submissions

# In the order of how often they are asked: a request is compared with each route before its own, 1 µs each.
ROUTERS: tuple[APIRouter, ...] = (
    leases.router,
    submissions.router,
    run.router,
    relays.router,
    log.router,
    nodes.router,
)
