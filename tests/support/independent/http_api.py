"""HTTP with limits on size and time, and signed requests (sections 3.2, 3.3 and 12)."""

from __future__ import annotations

import base64
import http.client
import secrets
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from .envelope import seal
from .messages import ERROR_REPLY, REQUEST_CLAIM
from .values import Refused, decode, digest, encode

KIB, MIB = 2**10, 2**20
CONTROL_CHARACTERS = dict.fromkeys((*range(32), *range(127, 160)))


@dataclass(frozen=True)
class Reply:
    """A response: its status, and a body within the limit that was asked for."""

    status: int
    body: bytes

    def expect(self, *statuses: int) -> bytes:
        """Return the body of a reply with one of `statuses`; raise what the ErrorReply says otherwise."""
        if self.status in statuses:
            return self.body
        try:
            error = decode(ERROR_REPLY, self.body, max_bytes=64 * KIB)
        except Refused:
            raise Refused("bad_reply", f"status {self.status}") from None
        raise Refused(error["code"], error["message"].translate(CONTROL_CHARACTERS))


def send(
    url: str,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    *,
    max_bytes: int,
    seconds: float = 40.0,
) -> Reply:
    """Send one request and read its reply; redirects are not followed.

    Raises Refused: `oversized` for a body over `max_bytes`, `unreachable` for everything that goes wrong on the way,
    `too_slow` after `seconds` in all.
    """
    parts = urllib.parse.urlsplit(url)
    kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}[parts.scheme]
    deadline = time.monotonic() + seconds
    connection = kind(parts.netloc, timeout=seconds)
    try:
        connection.request(method, parts.path + path, body=body, headers=headers or {})
        response = connection.getresponse()
        data = b""
        while piece := response.read1(64 * KIB):
            data += piece
            if len(data) > max_bytes:
                raise Refused("oversized", f"more than {max_bytes} bytes from {method} {path}")
            if time.monotonic() > deadline:
                raise Refused("too_slow", f"{method} {path}")
        if response.length:
            raise Refused("unreachable", "the reply is shorter than it says")
        return Reply(response.status, data)
    except (OSError, http.client.HTTPException) as error:
        raise Refused("unreachable", f"{url}: {error}") from None
    finally:
        connection.close()


@dataclass
class Signer:
    """A node's key, and how it signs requests to one run."""

    run_id: str
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    clock: Callable[[], float] = time.time

    @property
    def node(self) -> str:
        """The node's id."""
        return self.key.public_key().public_bytes_raw().hex()

    def sign(self, method: str, path: str, body: bytes, **more: Any) -> tuple[str, str]:
        """Return the Authorization header for a request, and the digest of its envelope: a submission's id.

        `more` are fields of the claim that other requests leave out.
        """
        claim = {
            "run_id": self.run_id,
            "method": method,
            "path": path.partition("?")[0],
            "body_digest": digest(body),
            "body_bytes": len(body),
            "issued_at": int(self.clock()),
            "nonce": secrets.token_hex(16),
            **more,
        }
        envelope = seal(self.key, "swarmproof/request", encode(REQUEST_CLAIM, claim))
        return "Swarmproof " + base64.urlsafe_b64encode(envelope).decode(), digest(envelope)
