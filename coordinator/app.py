"""The coordinator's HTTP service (docs/protocol.md, section 3), put together from its parts.

Bodies are read with a byte limit and a deadline before anything parses them. Every refusal is an ErrorReply
with a stable code; anything unforeseen is a 500 that says nothing about the inside.
"""

from __future__ import annotations

from fastapi import FastAPI

from coordinator.dashboard.routes import add_dashboard
from coordinator.http.connections import ConnectionQuota
from coordinator.http.errors import add_error_handlers
from coordinator.http.metrics import Metrics
from coordinator.http.middleware import RequestMiddleware
from coordinator.http.openapi import serve_document
from coordinator.http.rate_limits import AddressLimiter
from coordinator.http.routes import ROUTERS
from coordinator.http.service import RequestLimits, Service
from coordinator.http.shutdown import Shutdown
from coordinator.run.service import Coordinator

DEFAULT_REQUEST_LIMITS = RequestLimits()


def create_app(coordinator: Coordinator, *, limits: RequestLimits = DEFAULT_REQUEST_LIMITS) -> FastAPI:
    """Return the ASGI application that serves one run; its `state.service` is what the handlers share."""
    app = FastAPI(
        title="swarmproof coordinator",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # the Location would be made of the client's own Host header
    )

    def connections() -> ConnectionQuota | None:
        return getattr(app.state, "connections", None)

    metrics = Metrics(coordinator, connections=connections)
    service = Service(coordinator, limits=limits, metrics=metrics, shutdown=Shutdown(), connections=connections)
    app.state.service = service
    add_error_handlers(app, routers=ROUTERS, count=metrics.refused)
    addresses = AddressLimiter(per_minute=limits.per_address)
    app.add_middleware(RequestMiddleware, metrics=metrics, addresses=addresses, shedder=service.shedder)
    for router in ROUTERS:
        app.include_router(router)
    add_dashboard(app, coordinator, shutdown=service.shutdown)
    serve_document(app)
    return app
