"""The attacker's side of the wire: signs what it likes, and says what came back.

`node.client.api` is of no use here: it makes no wrong request, and tries again what was refused.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.lab.processes.journal import ACCEPTED
from node.keys.identity import node_id
from node.protocol.messages import (
    MAX_MESSAGE_BYTES,
    ErrorReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    Registration,
    RequestClaim,
    slot_name,
)
from node.protocol.requests import sign_request
from node.protocol.run import MAX_DESCRIPTOR_BYTES, Descriptor, open_descriptor
from shardcast.errors import PeerFault
from shardcast.wire import decode, digest, encode

CLOSED, TIMEOUT = "closed", "timeout"
MAX_REPLY_BYTES = 2 * 1024 * 1024
SECONDS = 30.0
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class RawReply:
    """What came back: `code` is ACCEPTED, a reason code, CLOSED or TIMEOUT; `status` is 0 for the last two."""

    status: int
    code: str
    body: bytes = b""

    @property
    def accepted(self) -> bool:
        """Whether the coordinator did what was asked."""
        return self.code == ACCEPTED


@dataclass(slots=True)
class Identity:
    """A key, and how many slots it was used for. `is_known` once it is registered."""

    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    uses: int = 0
    is_known: bool = False

    @property
    def node(self) -> str:
        """The node's id."""
        return node_id(self.key)

    @property
    def registration(self) -> Registration:
        """How it introduces itself: as on one machine, which its key names."""
        return Registration(software="redteam", engine="torch", instance=self.node[:32], name="redteam")

    def lease_request(self, *, held: tuple[int, ...], slots: int = 1) -> LeaseRequest:
        """Build its request for work."""
        return LeaseRequest(held_versions=held, slots=slots, instance=self.node[:32])


def claim_of(run_id: str, method: str, path: str, body: bytes = b"", /, **changes: Any) -> RequestClaim:
    """Build the claim that an honest node would sign for a request, with `changes`."""
    claim = RequestClaim(
        run_id=run_id,
        method=method,  # type: ignore[arg-type]
        path=path,
        body_digest=digest(body),
        body_bytes=len(body),
        issued_at=int(time.time()),
        nonce=secrets.token_hex(16),
    )
    return msgspec.structs.replace(claim, **changes)


class HostileClient:
    """A coordinator, as its enemies see it; use as an async context manager.

    `address` is the local address to come from: all of 127.0.0.0/8 is this machine on Linux, so one machine can be
    several strangers. Where it cannot be used, the usual one is.
    """

    def __init__(self, url: str, *, run_id: str, address: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.run_id = run_id
        self.address = address if address is not None and _can_bind(address) else None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        local = None if self.address is None else (self.address, 0)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(local_addr=local, limit=64),
            timeout=aiohttp.ClientTimeout(total=SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    def claim(self, method: str, path: str, body: bytes = b"", /, **changes: Any) -> RequestClaim:
        """Build the claim that an honest node of this run would sign for a request, with `changes`."""
        return claim_of(self.run_id, method, path, body, **changes)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes | AsyncIterable[bytes] = b"",
        *,
        header: str | None = None,
        seconds: float = SECONDS,
    ) -> RawReply:
        """Send bytes as they are, under an Authorization `header`."""
        if self._session is None:
            raise RuntimeError("a HostileClient is used inside `async with`")
        headers = {} if header is None else {"Authorization": header}
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=body or None,
                headers=headers,
                expect100=method == "PUT",
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as response:
                data = await response.content.read(MAX_REPLY_BYTES)
                while piece := await response.content.read(MAX_REPLY_BYTES - len(data)):
                    data += piece
                return RawReply(response.status, _code(response.status, data), data)
        except TimeoutError:
            return RawReply(0, TIMEOUT)
        except (aiohttp.ClientError, OSError):
            return RawReply(0, CLOSED)

    async def signed(
        self, identity: Identity, method: str, path: str, body: bytes = b"", **changes: Any
    ) -> tuple[RawReply, str]:
        """Send a request signed by `identity`, its claim changed; also the id of the request."""
        header, envelope = sign_request(self.claim(method, path, body, **changes), key=identity.key)
        return await self.send(method, path, body, header=header), digest(envelope)

    async def descriptor(self) -> tuple[Descriptor, bytes]:
        """Fetch the run's descriptor and public key, waiting for the coordinator. Raises PeerFault, TimeoutError."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            answer = await self.send("GET", "/v1/run")
            if answer.accepted and len(answer.body) <= 2 * MAX_DESCRIPTOR_BYTES:
                return open_descriptor(answer.body, run_id=self.run_id, now=time.time())
            await asyncio.sleep(0.25)
        raise TimeoutError(f"{self.url} does not answer")

    async def register(self, identity: Identity) -> RawReply:
        """Introduce a key."""
        body = encode(identity.registration)
        answer, _ = await self.signed(identity, "POST", "/v1/nodes", body)
        identity.is_known = answer.accepted
        return answer

    async def lease(self, identity: Identity, *, held: tuple[int, ...], slots: int = 1) -> tuple[RawReply, list[Lease]]:
        """Ask for work."""
        body = encode(identity.lease_request(held=held[:64], slots=slots))
        answer, _ = await self.signed(identity, "POST", "/v1/leases", body)
        if not answer.accepted:
            return answer, []
        try:
            return answer, list(decode(LeaseReply, answer.body, max_bytes=MAX_REPLY_BYTES).leases)
        except PeerFault:
            return RawReply(answer.status, "malformed_reply"), []

    async def give_back(self, identity: Identity, lease: Lease) -> RawReply:
        """Return a lease."""
        answer, _ = await self.signed(identity, "POST", f"/v1/leases/{lease.lease_id}/return")
        return answer

    async def submit(self, identity: Identity, lease: Lease, body: bytes, **changes: Any) -> tuple[RawReply, str]:
        """Upload a body for a lease."""
        changes = {"slot": slot_name(lease), **changes}
        return await self.signed(identity, "PUT", f"/v1/submissions/{lease.lease_id}", body, **changes)

    async def status(self) -> dict[str, Any] | None:
        """Fetch the run's status; None if it cannot be fetched."""
        answer = await self.send("GET", "/v1/status")
        try:
            value = msgspec.json.decode(answer.body) if answer.accepted else None
        except msgspec.DecodeError:
            return None
        return value if isinstance(value, dict) else None

    async def connect(self, head: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Open a bare connection and send `head`; None if the coordinator takes none."""
        where = urlsplit(self.url)
        local = None if self.address is None else (self.address, 0)
        try:
            async with asyncio.timeout(SECONDS):
                reader, writer = await asyncio.open_connection(where.hostname, where.port, local_addr=local)
                writer.write(head)
                await writer.drain()
        except (OSError, TimeoutError):
            return None
        return reader, writer


def _code(status: int, body: bytes) -> str:
    if 200 <= status < 300:
        return ACCEPTED
    try:
        return decode(ErrorReply, body, max_bytes=MAX_MESSAGE_BYTES).code
    except PeerFault:
        return f"http_{status}"


def _can_bind(address: str) -> bool:
    with socket.socket() as candidate:
        try:
            candidate.bind((address, 0))
        except OSError:
            return False
    return True
