"""HTTP interface of an origin and of a relay: one read-only application, the same for everyone.

    GET /v1/head?after=V&wait=S     the signed head, once its version exceeds V; 204 after S seconds
    GET /v1/versions/{version}      the manifest envelope of a version
    GET /v1/manifests/{digest}      the manifest envelope with this digest
    GET /v1/payloads/{digest}/{index}?wait=S
                                    a chunk; waits up to S seconds for one still on its way, then 503;
                                    with a rate limit it may wait for its turn as well
    GET /content/{digest}/v1/...    versions, manifests and payloads of a file beside the run's versions
    GET /v1/status                  versions and sources as JSON, for people
    GET /health, GET /metrics       liveness, and Prometheus metrics

Clients verify everything, so nothing served has to be trusted. Names in URLs are digests and numbers, matched by the
router before any file is touched.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import msgspec
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from shardcast.errors import LocalFault, Malformed
from shardcast.manifest import KIB, SignedManifest
from shardcast.serve.listener import DEFAULT_SERVER_LIMITS, ServerLimits
from shardcast.serve.metrics import ContentsCollector, ServedStateCollector, missing_chunks
from shardcast.serve.pacing import ChunkTurn, Pacer
from shardcast.serve.refusals import refusal
from shardcast.serve.state import ServedState
from shardcast.store.disk import disk_use
from shardcast.store.payload_file import ChunkLocation, PayloadFile
from shardcast.wire import MAX_INTEGER

logger = logging.getLogger(__name__)

NO_CONTENTS: Final[Mapping[str, ServedState]] = MappingProxyType({})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Sending = Callable[[asyncio.Transport], Awaitable[None]]

_DIGEST = "{digest:[0-9a-f]{64}}"
_VERSION = "{version:[0-9]{1,16}}"
_INDEX = "{index:[0-9]{1,7}}"
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?")
_OCTET_STREAM = "application/octet-stream"
_CACHE_FOREVER = "public, max-age=31536000, immutable"
"""For content named by its digest."""
_NO_STORE = "no-store"
_CONTENT = "/content/"
_PIECE_BYTES = 64 * KIB
_HEADER_BYTES = 256
"""Roughly what aiohttp sends before a body."""

_TURN_TIMEOUT_S = 5.0
"""How long beyond its own wait a client is kept waiting for its chunk's turn; our client waits 10 s longer."""


class _DeadlineResponse(web.StreamResponse):
    """A response with a send deadline: a reader that is too slow loses its connection."""

    def __init__(self, deadline_s: float, caching: str) -> None:
        super().__init__(headers={hdrs.CONTENT_TYPE: _OCTET_STREAM, hdrs.CACHE_CONTROL: caching})
        self._deadline_s = deadline_s

    async def _within_deadline(self, request: web.BaseRequest, send: Sending) -> AbstractStreamWriter | None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("peer disconnected")
        try:
            async with asyncio.timeout(self._deadline_s):
                writer = await super().prepare(request)
                await send(transport)
                await super().write_eof()
                return writer
        except TimeoutError as error:
            transport.abort()
            raise ConnectionResetError("peer reads too slowly") from error


class _ChunkResponse(_DeadlineResponse):
    """A chunk sent by sendfile, in pieces under a rate limit; 503 if its turn has not come by `give_up_at`.

    Not web.FileResponse: that opens the file in a thread and leaks it when the peer disconnects meanwhile.
    """

    def __init__(
        self, file: PayloadFile, index: int, deadline_s: float, *, pacer: Pacer | None, give_up_at: float
    ) -> None:
        super().__init__(deadline_s, _CACHE_FOREVER)
        self._file, self._index = file, index
        self._pacer, self._give_up_at = pacer, give_up_at

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        length = self._file.payload.chunk_length(self._index)
        if self._pacer is None:
            return await self._open_and_send(request, self._send_whole)
        turn = ChunkTurn()
        try:
            async with asyncio.timeout_at(self._give_up_at):
                await self._pacer.allow(min(length, self._pacer.piece_bytes), turn)
            return await self._open_and_send(request, partial(self._send_pieces, self._pacer, turn))
        except TimeoutError:
            return await self._refuse(request, 503)
        finally:
            self._pacer.end(turn)

    async def _open_and_send(
        self, request: web.BaseRequest, send: Callable[[ChunkLocation, asyncio.Transport], Awaitable[None]]
    ) -> AbstractStreamWriter | None:
        try:
            location = self._file.location(self._index)
        except LocalFault:
            return await self._refuse(request, 503)
        if location is None:  # dropped after the lookup
            return await self._refuse(request, 404)
        with location.file:
            self.content_length = location.length
            return await self._within_deadline(request, partial(send, location))

    async def _send_whole(self, location: ChunkLocation, transport: asyncio.Transport) -> None:
        await asyncio.get_running_loop().sendfile(transport, location.file, location.offset, location.length)

    async def _send_pieces(
        self, pacer: Pacer, turn: ChunkTurn, location: ChunkLocation, transport: asyncio.Transport
    ) -> None:
        """Send the chunk in pieces; the first piece is already allowed."""
        loop = asyncio.get_running_loop()
        for start in range(0, location.length, pacer.piece_bytes):
            length = min(pacer.piece_bytes, location.length - start)
            if start:
                await pacer.allow(length, turn)
            if transport.is_closing():
                raise ConnectionResetError("peer disconnected")
            await loop.sendfile(transport, location.file, location.offset + start, length)

    async def _refuse(self, request: web.BaseRequest, status: int) -> AbstractStreamWriter | None:
        self.set_status(status)
        self.headers[hdrs.CACHE_CONTROL] = _NO_STORE
        self.content_length = 0
        return await web.StreamResponse.prepare(self, request)


class _ManifestResponse(_DeadlineResponse):
    """A manifest envelope sent piecewise: sent whole, every slow reader would hold a copy of megabytes."""

    def __init__(self, envelope: bytes, deadline_s: float, caching: str, *, pacer: Pacer | None) -> None:
        super().__init__(deadline_s, caching)
        self._envelope, self._pacer = memoryview(envelope), pacer
        self.content_length = len(envelope)

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return await self._within_deadline(request, self._send)

    async def _send(self, _: asyncio.Transport) -> None:
        step = _PIECE_BYTES if self._pacer is None else min(_PIECE_BYTES, self._pacer.piece_bytes)
        for start in range(0, len(self._envelope), step):
            piece = self._envelope[start : start + step]
            if self._pacer is not None:
                await self._pacer.allow(len(piece))
            await self.write(piece)


class ShardServer:
    """Request handlers over one node's state."""

    def __init__(
        self,
        served: ServedState,
        limits: ServerLimits,
        *,
        pacer: Pacer | None,
        contents: Mapping[str, ServedState] = NO_CONTENTS,
    ) -> None:
        self._served, self._contents = served, contents
        self._limits = limits
        self._pacer = pacer
        self._registry = CollectorRegistry()
        self._registry.register(ServedStateCollector(served))
        self._registry.register(ContentsCollector(contents))

    def handlers(self) -> dict[str, Handler]:
        """Return the handler of each path of a run."""
        return {
            "/v1/head": self.head,
            **self.file_handlers(""),
            "/v1/status": self.status,
            "/health": self.health,
            "/metrics": self.metrics,
        }

    def file_handlers(self, prefix: str) -> dict[str, Handler]:
        """Return the handler of each path below `prefix` that serves manifests and chunks."""
        return {
            f"{prefix}/v1/versions/{_VERSION}": self.version,
            f"{prefix}/v1/manifests/{_DIGEST}": self.manifest,
            f"{prefix}/v1/payloads/{_DIGEST}/{_INDEX}": self.chunk,
        }

    def routes(self, handlers: Mapping[str, Handler]) -> list[web.RouteDef]:
        """Return the routes of `handlers`, and of every refusal.

        Routed explicitly: aiohttp rebuilds its own 404 and 405 handling, middleware included, per request.
        """
        return [
            *(web.get(path, handler, allow_head=False) for path, handler in handlers.items()),
            *(web.route("*", path, self.not_allowed) for path in handlers),
            web.route("*", "/{rest:.*}", self.not_found),
        ]

    async def not_allowed(self, _: web.Request) -> web.StreamResponse:
        response = refusal(405, "bad_request", "Method Not Allowed")
        response.headers[hdrs.ALLOW] = hdrs.METH_GET
        return response

    async def not_found(self, _: web.Request) -> web.StreamResponse:
        return refusal(404, "not_found", "Not Found")

    async def head(self, request: web.Request) -> web.StreamResponse:
        after = _version(request, "after")
        announced = await self._served.newer_head(after, self._wait_s(request))
        if announced is None:
            return web.Response(status=204)
        return web.Response(body=announced.envelope, content_type=_OCTET_STREAM)

    async def version(self, request: web.Request) -> web.StreamResponse:
        return self._manifest(self._served.store.get(int(request.match_info["version"])), _NO_STORE)

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        return self._manifest(self._served.store.by_digest(request.match_info["digest"]), _CACHE_FOREVER)

    def _manifest(self, signed: SignedManifest | None, caching: str) -> web.StreamResponse:
        if signed is None:
            return refusal(404, "unknown_version", "version is not held here")
        return _ManifestResponse(signed.envelope, self._limits.transfer_timeout_s, caching, pacer=self._pacer)

    async def chunk(self, request: web.Request) -> web.StreamResponse:
        name, index = request.match_info["digest"], int(request.match_info["index"])
        wait_s = self._wait_s(request)
        give_up_at = asyncio.get_running_loop().time() + wait_s + _TURN_TIMEOUT_S
        file = await self._served.chunk(name, index, wait_s)
        if file is not None:
            limits, pacer = self._limits, self._pacer
            return _ChunkResponse(file, index, limits.transfer_timeout_s, pacer=pacer, give_up_at=give_up_at)
        if self._served.expects(name, index):
            return refusal(503, "not_yet", "chunk has not arrived here yet; retry, or use another source")
        return refusal(404, "unknown_chunk", "chunk belongs to no version held here")

    async def status(self, _: web.Request) -> web.StreamResponse:
        body = msgspec.json.encode(await asyncio.to_thread(describe, self._served, self._contents))
        return web.Response(body=body, content_type="application/json")

    async def health(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=b'{"status":"ok"}', content_type="application/json")

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        body = await asyncio.to_thread(generate_latest, self._registry)
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE_LATEST})

    def _wait_s(self, request: web.Request) -> float:
        text = request.query.get("wait", "0")
        if _SECONDS.fullmatch(text) is None:
            raise Malformed("wait must be seconds, such as 5 or 2.5", code="bad_query")
        return min(float(text), self._limits.max_wait_s)

    async def pace(self, response: web.StreamResponse) -> None:
        """Wait until `response` may be sent; for a large one, until its headers may."""
        if self._pacer is not None:
            body_bytes = 0 if isinstance(response, _DeadlineResponse) else response.content_length or 0
            await self._pacer.allow(_HEADER_BYTES + body_bytes)

    async def count_sent(self, request: web.Request, response: web.StreamResponse) -> None:
        """Count a response as this node's, and one below a content's path as that content's as well."""
        sent = response.content_length or 0
        self._served.traffic.bytes_out += sent
        content = self._contents.get(request.path.removeprefix(_CONTENT).partition("/")[0])
        if content is not None:
            content.traffic.bytes_out += sent


def content_path(digest: str) -> str:
    """Return the path below which content `digest` is served."""
    return _CONTENT + digest


def make_app(
    served: ServedState,
    limits: ServerLimits = DEFAULT_SERVER_LIMITS,
    contents: Mapping[str, ServedState] = NO_CONTENTS,
) -> web.Application:
    """Build the application that serves `served`, and `contents` by digest; it must run in the event loop that opened
    them.
    """
    pacer = None if limits.max_bytes_per_s is None else Pacer(limits.max_bytes_per_s)
    server = ShardServer(served, limits, pacer=pacer, contents=contents)
    handlers = server.handlers()
    for digest, content in contents.items():
        handlers |= ShardServer(content, limits, pacer=pacer).file_handlers(content_path(digest))

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        served.traffic.requests += 1
        response = await _handle_errors(request, handler)
        response.headers["X-Content-Type-Options"] = "nosniff"
        if not isinstance(response, _DeadlineResponse):
            response.headers[hdrs.CACHE_CONTROL] = _NO_STORE
        if response.status >= 400:
            served.traffic.refused += 1
        await server.pace(response)
        return response

    app = web.Application(middlewares=[guard], client_max_size=1)
    app.add_routes(server.routes(handlers))
    app.on_response_prepare.append(server.count_sent)
    return app


async def _handle_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.body_exists:
        response = refusal(413, "body_refused", "request bodies are not accepted")
        response.force_close()
        return response
    try:
        return await handler(request)
    except Malformed as error:
        return refusal(400, error.code, str(error))
    except LocalFault as error:  # the message names local files: log it, do not send it
        logger.debug("%s: %s (%s)", request.path, error, error.code)
        return refusal(503, error.code, "temporarily unavailable; retry, or use another source")
    except web.HTTPException as error:
        return refusal(error.status, "not_found" if error.status == 404 else "bad_request", error.reason)


def describe(served: ServedState, contents: Mapping[str, ServedState] = NO_CONTENTS) -> dict[str, Any]:
    """Build the /v1/status body: role, versions with chunks held, contents, sources with measurements, traffic."""
    head = served.head()
    store = served.store
    return {
        "role": served.role,
        "run_id": served.run_id,
        "version": None if head is None else head.version,
        "started_at": int(served.started_at),
        "versions": [
            {
                "version": signed.manifest.version,
                "manifest_digest": signed.digest,
                "result_bytes": signed.manifest.full.payload_bytes,
                "delta_bytes": {str(each.base_version): each.payload.payload_bytes for each in signed.manifest.deltas},
                "chunks_total": signed.manifest.full.chunk_count,
                "chunks_held": store.chunks_held(signed.manifest.version),
            }
            for signed in store.versions()
        ],
        "contents": [
            {"digest": digest, "chunks_missing": missing_chunks(content), "bytes_out": content.traffic.bytes_out}
            | {"disk_bytes": sum(disk_use(content.store.root).values())}
            for digest, content in contents.items()
        ],
        "planned_bytes": store.planned_bytes,
        "fetching": [
            {
                "version": version,
                "done_bytes": progress.done_bytes,
                "total_bytes": progress.total_bytes,
                "bytes_per_s": round(progress.bytes_per_s),
                "sources": progress.sources,
                "seconds_left": progress.seconds_left,
            }
            for version, progress in list(served.fetched.under_way.items())
        ],
        "upstreams": served.upstreams(),
        "fetched": {"bytes": served.fetched.bytes_in, "result_bytes": served.fetched.result_bytes},
        "bytes_in": served.bytes_in,
        "bytes_out": served.traffic.bytes_out,
        "requests": served.traffic.requests,
        "refused": served.traffic.refused,
    }


def _version(request: web.Request, name: str) -> int:
    """Parse a version from the query; -1 (before every version) when absent."""
    text = request.query.get(name)
    if text is None:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= MAX_INTEGER):
        raise Malformed(f"{name} must be a version number", code="bad_query")
    return int(text)
