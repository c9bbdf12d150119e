"""What tests of hostile broadcasts share: an honest origin, real relays and clients around it, and who lies between.

Everybody speaks HTTP on loopback. A hostile relay stands in front of the origin and spoils some of its answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast import (
    Client,
    DeltaSettings,
    DownloadLimits,
    Head,
    Listener,
    Manifest,
    Origin,
    OriginServer,
    Payload,
    Relay,
    SignedManifest,
    TransportLimits,
    listen,
    wire,
)
from shardcast.manifest import seal_head, seal_manifest

CHUNK = 4096
SIZE = 100 * CHUNK
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
RUN_ID = wire.digest(PUBLIC)

QUICK: dict[str, Any] = {
    "poll_s": 0.3,
    "download_limits": DownloadLimits(race_after_s=0.1, stall_s=20.0, chunk_wait_s=0.5),
    "transport_limits": TransportLimits(
        response_s=10.0, idle_s=5.0, rate_grace_s=3.0, min_bytes_per_s=2000, total_s=30.0
    ),
}
"""Leaves a bad source soon for a good one, and gives up so late that no pause of a busy machine is taken for an end."""
IMPATIENT: dict[str, Any] = {
    "poll_s": 0.3,
    "download_limits": DownloadLimits(race_after_s=0.1, stall_s=3.0, chunk_wait_s=0.5),
    "transport_limits": TransportLimits(
        response_s=2.0, idle_s=1.0, rate_grace_s=0.3, min_bytes_per_s=2000, total_s=6.0
    ),
}
"""Gives up while a test waits: for those that have to see the end of it."""
CHAINED = DeltaSettings(fold_every=1000)


class Between:
    """A relay that passes on what an honest node answers, but for what a subclass spoils."""

    scene: Scene

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.asked: Counter[str] = Counter()

    async def start(self) -> str:
        self._session = aiohttp.ClientSession()
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", self._handle)])
        self._listener: Listener = await listen(app)
        return f"http://127.0.0.1:{self._listener.port}"

    async def stop(self) -> None:
        await self._listener.stop()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked[request.path.split("/")[2]] += 1
        return await self.answer(request)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        answers: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "head": self.head,
            "manifests": self.manifest,
            "versions": self.manifest,
            "payloads": self.chunk,
        }
        return await answers[request.path.split("/")[2]](request)

    async def head(self, request: web.Request) -> web.StreamResponse:
        return await self.honest(request.path_qs)

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        return await self.honest(request.path_qs)

    async def chunk(self, request: web.Request) -> web.StreamResponse:
        return await self.honest(request.path_qs)

    async def honest(self, path: str) -> web.Response:
        async with self._session.get(self.upstream + path) as response:
            return web.Response(status=response.status, body=await response.read())

    async def data(self, request: web.Request) -> bytes:
        """What the honest answer to this request has."""
        return bytes((await self.honest(request.path_qs)).body)  # type: ignore[arg-type]


class Shows(Between):
    """Has answers of its own for some paths."""

    shown: dict[str, bytes]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if (body := self.shown.get(request.path)) is not None:
            return web.Response(body=body)
        return await self.honest(request.path_qs)


class Withholds(Between):
    """Serves everything but the paths that it is told, or else all chunks: it never answers for those, or `status`."""

    def __init__(
        self,
        upstream: str,
        *,
        kept: Callable[[str], bool] = lambda path: "/payloads/" in path,
        status: int | None = None,
    ) -> None:
        super().__init__(upstream)
        self._kept, self._status = kept, status

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if not self._kept(request.path):
            return await self.honest(request.path_qs)
        if self._status is None:
            await asyncio.sleep(3600)
        return web.Response(status=self._status or 500)


class Scene:
    """An origin that publishes versions which differ little, and what is around it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._stops = folder, list[Callable[[], Any]]()
        self._weights = np.random.default_rng(0).integers(0, 2**16, SIZE // 2, dtype=np.uint16)
        self.origin = Origin(folder / "origin", KEY, RUN_ID, chunk_bytes=CHUNK, deltas=CHAINED)
        self.server = OriginServer(self.origin)
        self.url = f"http://127.0.0.1:{self.server.start()}"

    @property
    def weights(self) -> bytes:
        """What was published last."""
        return self._weights.tobytes()

    async def publish(self, version: int) -> bytes:
        at = np.random.default_rng(version).choice(len(self._weights), len(self._weights) // 20, replace=False)
        self._weights[at] += 1
        self._weights.tofile(self.folder / "weights")
        await asyncio.to_thread(self.server.publish, self.folder / "weights", version=version)
        return self.weights

    def signed(self, version: int) -> SignedManifest:
        signed = self.origin.store.get(version)
        assert signed is not None
        return signed

    async def hostile(self, kind: type[Between], **options: Any) -> tuple[str, Any]:
        node = kind(self.url, **options)
        node.scene = self
        url = await node.start()
        self._stops.append(node.stop)
        return url, node

    async def honest(self) -> str:
        """One more node that serves everything as it is."""
        return (await self.hostile(Between))[0]

    async def showing(self, head: bytes) -> str:
        """A node that always shows this head."""
        url, node = await self.hostile(Shows)
        node.shown = {"/v1/head": head}
        return url

    async def relay(self, *upstreams: str, name: str = "relay", **options: Any) -> tuple[str, Relay]:
        relay = Relay(
            upstreams,
            store_dir=self.folder / name,
            run_id=RUN_ID,
            publisher_key=PUBLIC,
            **{**QUICK, **options},
        )
        url = f"http://127.0.0.1:{await relay.start()}"
        self._stops.append(relay.stop)
        return url, relay

    def client(self, *sources: str, name: str = "client", **options: Any) -> Client:
        client = Client(RUN_ID, PUBLIC, sources, self.folder / name, **{**QUICK, **options})
        self._stops.append(client.close)
        return client

    async def client_with_version_1(self, *sources: str, **options: Any) -> Client:
        """A client that holds the base of a delta from an honest time, and has bad company from now on."""
        client = self.client(self.url, **options)
        await fetched(client)
        client.set_sources(sources)
        return client

    async def close(self) -> None:
        for stop in reversed(self._stops):
            await stop()
        await asyncio.to_thread(self.server.stop)
        self.origin.close()


async def fetched(client: Client, *, after: int = -1) -> bytes:
    head = await client.wait_head(after=after, timeout_s=60)
    assert head is not None
    return (await client.fetch(head, timeout_s=60)).read_bytes()


def row(rows: list[dict[str, Any]], url: str) -> dict[str, Any]:
    return next(row for row in rows if row["url"] == url)


# -- what only the publisher's key can make


def head_of(signed: SignedManifest, **changes: Any) -> bytes:
    """A head that names this manifest as the newest, but for `changes`."""
    now = int(time.time())
    fields: dict[str, Any] = {
        "run_id": RUN_ID,
        "version": signed.manifest.version,
        "manifest_digest": signed.digest,
        "issued_at": now,
        "expires_at": now + 60,
    }
    return seal_head(Head(**{**fields, **changes}), KEY)


def shown(signed: SignedManifest) -> dict[str, bytes]:
    """What a node answers whose newest version is this one."""
    paths = (f"/v1/manifests/{signed.digest}", f"/v1/versions/{signed.manifest.version}")
    return {"/v1/head": head_of(signed), **dict.fromkeys(paths, signed.envelope)}


def changed(signed: SignedManifest, **changes: Any) -> SignedManifest:
    """A manifest that the publisher signs, though it made it otherwise."""
    fields = {name: getattr(signed.manifest, name) for name in Manifest.__struct_fields__}
    return seal_manifest(Manifest(**{**fields, **changes}), KEY)


def payload_of(data: bytes) -> Payload:
    digests = (bytes.fromhex(wire.digest(data[at : at + CHUNK])) for at in range(0, len(data), CHUNK))
    return Payload(chunk_bytes=CHUNK, payload_bytes=len(data), chunk_digests=b"".join(digests))
