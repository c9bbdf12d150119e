"""The dashboard's routes: public, read-only, and without third-party content."""

from __future__ import annotations

import functools
import gzip
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from coordinator.dashboard.assets import IMMUTABLE, PREFIX, Asset, Assets
from coordinator.dashboard.audits import read_audit
from coordinator.dashboard.events import EventHub, Subscription
from coordinator.dashboard.find import find
from coordinator.dashboard.nodes import OUTCOMES, read_node
from coordinator.dashboard.pages import Pages
from coordinator.dashboard.submissions import read_record, view_of
from coordinator.dashboard.workers import parse_query
from coordinator.http.middleware import address_of
from coordinator.http.shutdown import Shutdown
from coordinator.run.service import Coordinator
from node.protocol.reasons import Reason, Refusal
from shardcast.wire import MAX_INTEGER, is_digest

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

SECURITY: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_HTML: Final = "text/html; charset=utf-8"
_LEAST_COMPRESSED: Final = 1024
_Text = Annotated[str, Query(max_length=100)]


def add_dashboard(app: FastAPI, coordinator: Coordinator, *, shutdown: Shutdown) -> None:
    """Add the dashboard's routes to `app`."""
    assets = Assets()
    pages = Pages(coordinator, assets)

    async def read_sections() -> dict[str, str]:
        return await run_in_threadpool(pages.sections)

    hub = EventHub(read_sections, shutdown=shutdown)
    _page_routes(app, coordinator, pages)
    _live_routes(app, hub)

    @app.get(PREFIX + "/{version}/{name}", include_in_schema=False)
    def asset(request: Request, version: str, name: str) -> Response:
        found = assets.get(version, name)
        if found is None:
            raise Refusal(Reason.NOT_FOUND, "No such file.")
        return _file(request, found)


def _in_words(pages: Pages) -> Callable[[Callable[..., Response]], Callable[..., Response]]:
    """Return the decorator of a page's route with which people read a refusal on a page."""

    def decorate(answer: Callable[..., Response]) -> Callable[..., Response]:
        @functools.wraps(answer)
        def answered(request: Request, **given: Any) -> Response:
            try:
                return answer(request, **given)
            except Refusal as refusal:
                return _page(request, pages.missing(refusal.detail), status=refusal.reason.status or 400)

        return answered

    return decorate


def _page_routes(app: FastAPI, coordinator: Coordinator, pages: Pages) -> None:
    @app.get("/", include_in_schema=False)
    @_in_words(pages)
    def run(request: Request, sort: _Text = "credit", after: _Text = "", find: _Text = "") -> Response:
        return _page(request, pages.run(parse_query(sort, after, find)))

    @app.get("/health-line", include_in_schema=False)
    def health_line(request: Request) -> Response:
        return _page(request, pages.health_line())

    @app.get("/audit", include_in_schema=False)
    def audit(request: Request, at: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None) -> Response:
        return _page(request, pages.audit(read_audit(coordinator, at=at)))

    @app.get("/find", include_in_schema=False)
    def find_anything(request: Request, q: _Text = "") -> Response:
        with coordinator.home.database.read() as connection:
            found = find(connection, q, home=coordinator.home)
        if found.only is not None:
            return RedirectResponse(found.only, status_code=303, headers=SECURITY)
        return _page(request, pages.found(found))

    @app.get("/nodes/{node}", include_in_schema=False)
    @_in_words(pages)
    def node_page(
        request: Request,
        node: str,
        outcome: _Text = "",
        before: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
    ) -> Response:
        view = None
        if is_digest(node) and outcome in ("", *OUTCOMES):
            view = read_node(coordinator, node, outcome=outcome, before=before, now=time.time())
        if view is None:
            return _page(request, pages.missing("No node has registered with this id."), status=404)
        return _page(request, pages.node(view))

    @app.get("/submissions/{submission}", include_in_schema=False)
    def submission(
        request: Request, submission: str, row: Annotated[int | None, Query(ge=0, le=1023)] = None
    ) -> Response:
        view = None
        if is_digest(submission):
            home = coordinator.home
            with home.database.read() as connection:
                record = read_record(connection, submission, spec=home.spec, run_id=home.run_id)
            view = None if record is None else view_of(record, home.blobs, spec=home.spec, row=row)
        if view is None:
            return _page(request, pages.missing("Nobody sent a submission with this id."), status=404)
        return _page(request, pages.submission(view))


def _live_routes(app: FastAPI, hub: EventHub) -> None:
    @app.get("/v1/events", include_in_schema=False)
    async def events(request: Request) -> Response:
        subscription = hub.subscribe(address_of(request.scope))
        return _EventStream(hub, subscription, mark=request.headers.get("last-event-id", "")[:40])

    @app.get("/v1/events/now", include_in_schema=False)
    async def events_now(request: Request, mark: Annotated[str, Query(max_length=40)] = "") -> Response:
        body = json.dumps(await hub.now(mark), separators=(",", ":")).encode()
        return _answer(request, body, "application/json", {"Cache-Control": "no-store"})


class _EventStream(StreamingResponse):
    """An event stream that releases its subscription however it ends, even before its first byte."""

    def __init__(self, hub: EventHub, subscription: Subscription, *, mark: str) -> None:
        headers = {**SECURITY, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(hub.stream(subscription, mark=mark), media_type="text/event-stream", headers=headers)
        self._hub, self._subscription = hub, subscription

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._hub.unsubscribe(self._subscription)


def _page(request: Request, html: bytes, *, status: int = 200) -> Response:
    return _answer(request, html, _HTML, {**SECURITY, "Cache-Control": "no-cache"}, status=status)


def _file(request: Request, asset: Asset) -> Response:
    headers = {**SECURITY, "Cache-Control": IMMUTABLE, "Vary": "Accept-Encoding"}
    if _takes_gzip(request):
        return Response(asset.compressed, media_type=asset.media_type, headers=headers | {"Content-Encoding": "gzip"})
    return Response(asset.plain, media_type=asset.media_type, headers=headers)


def _answer(request: Request, body: bytes, media_type: str, headers: dict[str, str], *, status: int = 200) -> Response:
    headers = {**SECURITY, **headers, "Vary": "Accept-Encoding"}
    if len(body) >= _LEAST_COMPRESSED and _takes_gzip(request):
        body = gzip.compress(body, 5, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(body, status_code=status, media_type=media_type, headers=headers)


def _takes_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")[:200]
