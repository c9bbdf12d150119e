"""The coordinator's HTTP endpoints, one router for each resource (`node.protocol.endpoints` declares them)."""

from fastapi import APIRouter

from coordinator.http.routes import leases, log, nodes, relays, run, submissions

ROUTERS: tuple[APIRouter, ...] = (
    run.router,
    relays.router,
    log.router,
    nodes.router,
    leases.router,
    submissions.router,
)
