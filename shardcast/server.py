"""The HTTP face of an origin and of a relay: one application, read-only, the same for everyone.

    GET /v1/head?after=V&wait=S     the signed head, once its version exceeds V; 204 after S seconds
    GET /v1/versions/{version}      the manifest envelope of a version
    GET /v1/manifests/{digest}      the manifest envelope with this digest
    GET /v1/payloads/{digest}/{index}?wait=S
                                    a chunk; one still on its way is waited for up to S seconds, then 503,
                                    and with a limited rate so is its turn
    GET /v1/status                  what is held and from where, as JSON, for people
    GET /health, GET /metrics       liveness, and Prometheus figures

Nothing served has to be trusted: whoever fetches verifies. Names in URLs are digests and numbers, matched
by the router before any file is touched.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from shardcast.board import Board
from shardcast.errors import LocalFault, Malformed
from shardcast.listener import DEFAULT_SERVER_LIMITS, ServerLimits
from shardcast.manifest import KIB, SignedManifest
from shardcast.metrics import BoardCollector
from shardcast.pacing import Pacer, Turn
from shardcast.payload_file import PayloadFile, Place
from shardcast.refusals import refusal
from shardcast.wire import MAX_INTEGER

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Sending = Callable[[asyncio.Transport], Awaitable[None]]

_DIGEST = "{digest:[0-9a-f]{64}}"
_VERSION = "{version:[0-9]{1,16}}"
_INDEX = "{index:[0-9]{1,7}}"
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?")
_BINARY = "application/octet-stream"
_FOR_EVER = "public, max-age=31536000, immutable"
"""What is named by its digest: caches in front of a node may keep it."""
_NEVER = "no-store"
_PIECE_BYTES = 64 * KIB
_HEADER_BYTES = 256
"""About what aiohttp sends before a body."""

_TURN_S = 5.0
"""How much longer than it said a reader waits for the turn of its chunk; our own waits 10 s longer."""


class _Bounded(web.StreamResponse):
    """An answer that is sent within a deadline: a reader that dawdles loses its connection."""

    def __init__(self, deadline_s: float, caching: str) -> None:
        super().__init__(headers={hdrs.CONTENT_TYPE: _BINARY, hdrs.CACHE_CONTROL: caching})
        self._deadline_s = deadline_s

    async def _within_deadline(self, request: web.BaseRequest, send: Sending) -> AbstractStreamWriter | None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the peer has gone")
        try:
            async with asyncio.timeout(self._deadline_s):
                writer = await super().prepare(request)
                await send(transport)
                await super().write_eof()
                return writer
        except TimeoutError as error:
            transport.abort()
            raise ConnectionResetError("the peer reads too slowly") from error


class _Chunk(_Bounded):
    """A chunk by sendfile, in pieces where the rate is limited; 503 if its turn does not come until `give_up_at`.

    Not web.FileResponse: that opens the file in a thread, and loses it when the peer leaves meanwhile.
    """

    def __init__(
        self, file: PayloadFile, index: int, deadline_s: float, *, pacer: Pacer | None, give_up_at: float
    ) -> None:
        super().__init__(deadline_s, _FOR_EVER)
        self._file, self._index = file, index
        self._pacer, self._give_up_at = pacer, give_up_at

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        length = self._file.payload.chunk_length(self._index)
        if self._pacer is None:
            return await self._open_and_send(request, self._send_whole)
        turn = Turn()
        try:
            async with asyncio.timeout_at(self._give_up_at):
                await self._pacer.allow(min(length, self._pacer.piece_bytes), turn)
            return await self._open_and_send(request, partial(self._send_pieces, self._pacer, turn))
        except TimeoutError:
            return await self._refuse(request, 503)
        finally:
            self._pacer.end(turn)

    async def _open_and_send(
        self, request: web.BaseRequest, send: Callable[[Place, asyncio.Transport], Awaitable[None]]
    ) -> AbstractStreamWriter | None:
        try:
            place = self._file.place(self._index)
        except LocalFault:
            return await self._refuse(request, 503)
        if place is None:  # dropped since it was looked up
            return await self._refuse(request, 404)
        with place.file:
            self.content_length = place.length
            return await self._within_deadline(request, partial(send, place))

    async def _send_whole(self, place: Place, transport: asyncio.Transport) -> None:
        await asyncio.get_running_loop().sendfile(transport, place.file, place.offset, place.length)

    async def _send_pieces(self, pacer: Pacer, turn: Turn, place: Place, transport: asyncio.Transport) -> None:
        """The first piece is allowed already."""
        loop = asyncio.get_running_loop()
        for start in range(0, place.length, pacer.piece_bytes):
            length = min(pacer.piece_bytes, place.length - start)
            if start:
                await pacer.allow(length, turn)
            if transport.is_closing():
                raise ConnectionResetError("the peer has gone")
            await loop.sendfile(transport, place.file, place.offset + start, length)

    async def _refuse(self, request: web.BaseRequest, status: int) -> AbstractStreamWriter | None:
        self.set_status(status)
        self.headers[hdrs.CACHE_CONTROL] = _NEVER
        self.content_length = 0
        return await web.StreamResponse.prepare(self, request)


class _Manifest(_Bounded):
    """An envelope piece by piece: in one, every slow reader would have megabytes of it copied for itself."""

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


class Server:
    """Handlers over one board."""

    def __init__(self, board: Board, limits: ServerLimits) -> None:
        self._board = board
        self._limits = limits
        self._pacer = None if limits.max_bytes_per_s is None else Pacer(limits.max_bytes_per_s)
        self._registry = CollectorRegistry()
        self._registry.register(BoardCollector(board))

    def routes(self) -> list[web.RouteDef]:
        served: dict[str, Handler] = {
            "/v1/head": self.head,
            f"/v1/versions/{_VERSION}": self.version,
            f"/v1/manifests/{_DIGEST}": self.manifest,
            f"/v1/payloads/{_DIGEST}/{_INDEX}": self.chunk,
            "/v1/status": self.status,
            "/health": self.health,
            "/metrics": self.metrics,
        }
        # aiohttp builds its own answers to other methods and paths anew each time, middleware and all.
        return [
            *(web.get(path, handler, allow_head=False) for path, handler in served.items()),
            *(web.route("*", path, self.not_allowed) for path in served),
            web.route("*", "/{rest:.*}", self.not_found),
        ]

    async def not_allowed(self, _: web.Request) -> web.StreamResponse:
        return refusal(405, "bad_request", "Method Not Allowed")

    async def not_found(self, _: web.Request) -> web.StreamResponse:
        return refusal(404, "not_found", "Not Found")

    async def head(self, request: web.Request) -> web.StreamResponse:
        after = _version(request, "after")
        found = await self._board.newer_head(after, self._wait_s(request))
        if found is None:
            return web.Response(status=204)
        return web.Response(body=found.envelope, content_type=_BINARY)

    async def version(self, request: web.Request) -> web.StreamResponse:
        return self._manifest(self._board.store.get(int(request.match_info["version"])), _NEVER)

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        return self._manifest(self._board.store.by_digest(request.match_info["digest"]), _FOR_EVER)

    def _manifest(self, signed: SignedManifest | None, caching: str) -> web.StreamResponse:
        if signed is None:
            return refusal(404, "unknown_version", "this version is not held here")
        return _Manifest(signed.envelope, self._limits.transfer_timeout_s, caching, pacer=self._pacer)

    async def chunk(self, request: web.Request) -> web.StreamResponse:
        name, index = request.match_info["digest"], int(request.match_info["index"])
        wait_s = self._wait_s(request)
        give_up_at = asyncio.get_running_loop().time() + wait_s + _TURN_S
        file = await self._board.chunk(name, index, wait_s)
        if file is not None:
            limits, pacer = self._limits, self._pacer
            return _Chunk(file, index, limits.transfer_timeout_s, pacer=pacer, give_up_at=give_up_at)
        if self._board.expects(name, index):
            return refusal(503, "not_yet", "this chunk has not arrived here yet; ask again or elsewhere")
        return refusal(404, "unknown_chunk", "no version held here has this chunk")

    async def status(self, _: web.Request) -> web.StreamResponse:
        body = msgspec.json.encode(await asyncio.to_thread(describe, self._board))
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
        """Wait until `response` may be sent; of what is large, until its headers may."""
        if self._pacer is not None:
            body_bytes = 0 if isinstance(response, _Bounded) else response.content_length or 0
            await self._pacer.allow(_HEADER_BYTES + body_bytes)

    async def count_sent(self, _: web.Request, response: web.StreamResponse) -> None:
        self._board.traffic.bytes_out += response.content_length or 0


def make_app(board: Board, limits: ServerLimits = DEFAULT_SERVER_LIMITS) -> web.Application:
    """The application that serves `board`; it must live in the board's event loop."""
    server = Server(board, limits)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        board.traffic.requests += 1
        response = await _guarded(request, handler)
        if not isinstance(response, _Bounded):
            response.headers[hdrs.CACHE_CONTROL] = _NEVER
        if response.status >= 400:
            board.traffic.refused += 1
        await server.pace(response)
        return response

    app = web.Application(middlewares=[guard], client_max_size=1)
    app.add_routes(server.routes())
    app.on_response_prepare.append(server.count_sent)
    return app


async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.body_exists:
        response = refusal(413, "body_refused", "this server takes no request bodies")
        response.force_close()
        return response
    try:
        return await handler(request)
    except Malformed as error:
        return refusal(400, error.code, str(error))
    except LocalFault as error:  # whose sentence names files
        logger.debug("%s: %s (%s)", request.path, error, error.code)
        return refusal(503, error.code, "this machine cannot serve it now; ask again or elsewhere")
    except web.HTTPException as error:
        return refusal(error.status, "not_found" if error.status == 404 else "bad_request", error.reason)


def describe(board: Board) -> dict[str, Any]:
    """What /v1/status shows: role, versions with chunks held, sources with measured figures, traffic."""
    head = board.head()
    store = board.store
    return {
        "role": board.role,
        "run_id": board.run_id,
        "version": None if head is None else head.version,
        "started_at": int(board.started_at),
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
            for version, progress in list(board.fetched.under_way.items())
        ],
        "upstreams": board.upstreams(),
        "fetched": {"bytes": board.fetched.bytes_in, "result_bytes": board.fetched.result_bytes},
        "bytes_in": board.bytes_in,
        "bytes_out": board.traffic.bytes_out,
        "requests": board.traffic.requests,
        "refused": board.traffic.refused,
    }


def _version(request: web.Request, name: str) -> int:
    """A version from the query; -1, before every version, when it is absent."""
    text = request.query.get(name)
    if text is None:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= MAX_INTEGER):
        raise Malformed(f"{name} must be a version number", code="bad_query")
    return int(text)
