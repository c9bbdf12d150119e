"""A publisher, and the real parts of a broadcast on loopback, stopped when the test ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardcast import Client, Limits, Origin, OriginServer, Relay, wire
from shardcast.manifest import KIB, Delta, Head, Manifest, Payload
from shardcast.store.versions import Store

CHUNK = 4 * KIB
SIZE = 600_000


def contents(version: int) -> bytes:
    """SIZE bytes, of which one differs from version to version, so that there are deltas."""
    data = bytearray(random.Random(0).randbytes(SIZE))
    for at in range(version):
        data[at * 1000] ^= 0xFF
    return bytes(data)


async def raw(port: int, request: bytes, *, wait_s: float = 60.0) -> bytes:
    """What the server answers to these exact bytes, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.read(100_000), wait_s)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@dataclass(frozen=True)
class Publisher:
    key: Ed25519PrivateKey

    @property
    def public(self) -> bytes:
        return self.key.public_key().public_bytes_raw()

    @property
    def run_id(self) -> str:
        return wire.digest(self.public)

    def head(self, **changes: Any) -> Head:
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "version": 1,
            "manifest_digest": "ab" * 32,
            "issued_at": 1_000,
            "expires_at": 1_060,
        }
        return Head(**{**fields, **changes})

    def payload(self, data: bytes = b"weights", *, chunk_bytes: int = CHUNK, **changes: Any) -> Payload:
        step = max(1, chunk_bytes)
        pieces = [data[at : at + step] for at in range(0, len(data), step)]
        fields: dict[str, Any] = {
            "chunk_bytes": chunk_bytes,
            "payload_bytes": len(data),
            "chunk_digests": b"".join(bytes.fromhex(wire.digest(piece)) for piece in pieces),
        }
        return Payload(**{**fields, **changes})

    def delta(self, data: bytes = b"", *, base_version: int = 0, **changes: Any) -> Delta:
        return Delta(base="cd" * 32, base_version=base_version, payload=self.payload(data or b"d", **changes))

    def manifest(self, data: bytes = b"weights", *, chunk_bytes: int = CHUNK, **changes: Any) -> Manifest:
        fields: dict[str, Any] = {
            "run_id": self.run_id,
            "version": 1,
            "previous": None,
            "issued_at": 1_000,
            "expires_at": 90_000,
            "result_digest": wire.digest(data),
            "full": self.payload(data, chunk_bytes=chunk_bytes),
            "deltas": (),
        }
        return Manifest(**{**fields, **changes})


@dataclass
class Swarm:
    """Makes origins, relays and clients of one run under one folder."""

    folder: Path
    publisher: Publisher
    _origins: list[tuple[Origin, OriginServer]] = field(default_factory=list)
    _relays: list[Relay] = field(default_factory=list)
    _clients: list[Client] = field(default_factory=list)

    def weights(self, size: int, *, seed: int = 0) -> Path:
        path = self.folder / f"weights-{size}-{seed}.bin"
        path.write_bytes(random.Random(seed).randbytes(size))
        return path

    def origin(self, *, name: str = "origin", **options: Any) -> tuple[str, OriginServer]:
        options.setdefault("chunk_bytes", CHUNK)
        origin = Origin(self.folder / name, self.publisher.key, self.publisher.run_id, **options)
        server = OriginServer(origin)
        self._origins.append((origin, server))
        return f"http://127.0.0.1:{server.start()}", server

    def store(self) -> Store:
        """The folder of versions of the last origin."""
        return self._origins[-1][0].store

    async def relay(self, *upstreams: str, name: str = "relay", **options: Any) -> tuple[str, Relay]:
        relay = Relay(
            upstreams,
            store_dir=self.folder / name,
            run_id=self.publisher.run_id,
            publisher_key=self.publisher.public,
            **options,
        )
        self._relays.append(relay)
        return f"http://127.0.0.1:{await relay.start()}", relay

    def client(self, *sources: str, name: str = "client", **options: Any) -> Client:
        client = Client(self.publisher.run_id, self.publisher.public, sources, self.folder / name, **options)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        for relay in self._relays:
            await relay.stop()
        for origin, server in self._origins:
            await asyncio.to_thread(server.stop)
            origin.close()


@pytest.fixture
def publisher() -> Publisher:
    return Publisher(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))


@pytest.fixture
def limits() -> Limits:
    return Limits(max_payload_bytes=2**20, max_chunks=64, max_chunk_bytes=64 * KIB)


@pytest.fixture
async def swarm(tmp_path: Path, publisher: Publisher) -> AsyncIterator[Swarm]:
    made = Swarm(tmp_path, publisher)
    yield made
    await made.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session
